// Decode steps of Gated Delta.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/recurrent_step_gated_delta.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/cpu/recurrent_step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

void step_blocks(const StepCall& call, const BlockList& blocks, int64_t begin, int64_t end,
                 float* memory) {
  run_step_blocks<Family::kGatedDelta>(call, blocks, begin, end, memory);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm::cpu {

HWY_EXPORT(step_blocks);

StepKernel gated_delta_step_kernel() { return HWY_DYNAMIC_DISPATCH(step_blocks); }

}  // namespace replayssm::cpu
#endif  // HWY_ONCE
