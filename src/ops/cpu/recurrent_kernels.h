// The kernels behind the recurrence's ops: one per family, each in a file of its own, since they
// take long to compile.
#pragma once

#include <cstdint>

#include "ops/cpu/recurrent_blocks.h"
#include "replayssm/ops.h"

namespace replayssm::cpu {

// A decode step, or, without query_start, a fold of all history.
struct StepCall : RecurrentStepParams {
  const int32_t* target_slot = nullptr;  // [sequences], null: in place
};

// Run blocks [begin, end) of the list with one thread's scratch memory.
using StepKernel = void (*)(const StepCall& call, const BlockList& blocks, int64_t begin,
                            int64_t end, float* memory);
StepKernel mamba2_step_kernel();
StepKernel gated_delta_step_kernel();
StepKernel kimi_delta_step_kernel();

using PrefillKernel = void (*)(const RecurrentPrefillParams& params, const Block& block,
                               float* memory);
PrefillKernel chunked_prefill_kernel();  // Mamba-2, Gated Delta
PrefillKernel kimi_delta_prefill_kernel();

}  // namespace replayssm::cpu
