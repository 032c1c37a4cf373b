// The ops of the recurrence: checks, blocks of work, choice of the kernel.

#include <algorithm>

#include "ops/check_params.h"
#include "ops/cpu/recurrent.h"
#include "ops/cpu/recurrent_blocks.h"
#include "ops/cpu/recurrent_kernels.h"

namespace replayssm::cpu {
namespace {

// Checks a call; returns whether it has tokens, without which their pointers may be null.
template <class Params>
bool check_call(Params params, WindowUse use) {
  SequenceBatch& batch = params.batch;
  if (batch.sequences > 0 && batch.query_start != nullptr &&
      batch.query_start[batch.sequences] == batch.query_start[0])
    batch.sequences = 0;
  check_params(params);
  if (batch.sequences == 0) return false;
  check_windows(batch, use);
  debug_check(batch, use);
  return true;
}

// Scratch of one thread for a prefill.
int64_t prefill_floats(const RecurrentShape& shape) {
  return shape.family == Family::kKimiDelta ? PieceScratch(nullptr, shape).floats
                                            : PrefillScratch(nullptr, shape).floats;
}

StepKernel step_kernel(Family family) {
  switch (family) {
    case Family::kMamba2: return mamba2_step_kernel();
    case Family::kGatedDelta: return gated_delta_step_kernel();
    case Family::kKimiDelta: break;
  }
  return kimi_delta_step_kernel();
}

void run_steps(const StepCall& call, void* workspace, ThreadPool& pool) {
  const int64_t scratch = StepScratch(nullptr, call.shape, call.batch.ring).floats;
  const BlockList blocks(call.batch.sequences, call.shape, pool.size());
  const StepKernel kernel = step_kernel(call.shape.family);
  pool.for_ranges(blocks.count(), [&](int64_t begin, int64_t end, int thread) {
    kernel(call, blocks, begin, end, static_cast<float*>(workspace) + thread * scratch);
  });
}

}  // namespace

int64_t recurrent_workspace_bytes(const RecurrentShape& shape, const RingConfig& ring,
                                  int threads) {
  const int64_t floats = std::max(StepScratch(nullptr, shape, ring).floats, prefill_floats(shape));
  return floats * threads * static_cast<int64_t>(sizeof(float));
}

void recurrent_step(const RecurrentStepParams& params, void* workspace, ThreadPool& pool) {
  if (!check_call(params, WindowUse::kDecode)) return;
  run_steps({params}, workspace, pool);
}

void recurrent_fold(const RecurrentFoldParams& params, void* workspace, ThreadPool& pool) {
  check_params(params);
  debug_check(params.batch, WindowUse::kNone);
  StepCall call;
  call.shape = params.shape;
  call.batch = params.batch;
  call.batch.query_start = nullptr;
  call.batch.parent = nullptr;
  call.state = params.state;
  call.channel_gate = params.channel_gate;
  call.rounding = params.rounding;
  call.target_slot = params.target_slot;
  run_steps(call, workspace, pool);
}

void recurrent_prefill(const RecurrentPrefillParams& params, void* workspace, ThreadPool& pool) {
  if (!check_call(params, WindowUse::kPrompt)) return;
  const int64_t scratch = prefill_floats(params.shape);
  const BlockList blocks(params.batch.sequences, params.shape, pool.size());
  const PrefillKernel kernel = params.shape.family == Family::kKimiDelta
                                   ? kimi_delta_prefill_kernel()
                                   : chunked_prefill_kernel();
  pool.for_ranges(blocks.count(), [&](int64_t begin, int64_t end, int thread) {
    float* memory = static_cast<float*>(workspace) + thread * scratch;
    for (int64_t i = begin; i < end; ++i) kernel(params, blocks[i], memory);
  });
}

}  // namespace replayssm::cpu
