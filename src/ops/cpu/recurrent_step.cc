// The ops of the recurrence: checks, blocks of work, choice of the kernel.

#include <algorithm>

#include "core/check.h"
#include "ops/cpu/recurrent.h"
#include "ops/cpu/recurrent_blocks.h"
#include "ops/cpu/recurrent_kernels.h"

namespace replayssm::cpu {
namespace {

void check_shape(const RecurrentShape& shape) {
  REPLAYSSM_CHECK(shape.heads > 0 && shape.key_heads > 0 && shape.heads % shape.key_heads == 0,
                  "heads=", shape.heads, " key_heads=", shape.key_heads);
  REPLAYSSM_CHECK(shape.head_dim > 0, "head_dim=", shape.head_dim);
  REPLAYSSM_CHECK(shape.state_dim > 0 && shape.state_dim <= kMaxStateDim,
                  "state_dim=", shape.state_dim, ", at most ", kMaxStateDim);
}

void check_recurrent(const RecurrentStepParams& p) {
  check_shape(p.shape);
  REPLAYSSM_CHECK(p.batch.sequences >= 0, "sequences=", p.batch.sequences);
  REPLAYSSM_CHECK(p.batch.ring.buffer_len >= 1 && p.batch.ring.max_window >= 1,
                  "buffer_len=", p.batch.ring.buffer_len, " max_window=", p.batch.ring.max_window);
  REPLAYSSM_CHECK(p.state.checkpoint != nullptr, "no checkpoint memory");
  REPLAYSSM_CHECK(p.state.read_copy.data == nullptr, "not on this backend yet");
  REPLAYSSM_CHECK(p.shape.family != Family::kKimiDelta ||
                      (p.channel_gate.scale != nullptr && p.channel_gate.bias != nullptr),
                  "Kimi Delta without channel_gate");
}

// Parents come before their tokens: walks end.
void check_tree(const SequenceBatch& batch) {
  if (batch.parent == nullptr) return;
  for (int64_t s = 0; s < batch.sequences; ++s) {
    const int32_t first = batch.query_start[s], count = batch.query_start[s + 1] - first;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t parent = batch.parent[first + i];
      REPLAYSSM_CHECK(parent >= -1 && parent < i, "sequence ", s, " token ", i, " parent=", parent);
    }
  }
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
  check_recurrent(call);
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
  REPLAYSSM_CHECK(params.batch.parent == nullptr || params.route != Route::kConventional,
                  "the conventional route has no tree windows");
  check_tree(params.batch);
  run_steps({params}, workspace, pool);
}

void recurrent_fold(const RecurrentFoldParams& params, void* workspace, ThreadPool& pool) {
  REPLAYSSM_CHECK(params.target_slot == nullptr, "not on this backend yet");
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
  REPLAYSSM_CHECK(params.batch.parent == nullptr, "a prefill has no tree windows");
  check_recurrent(params);
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
