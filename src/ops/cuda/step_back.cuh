// What a fused step does behind the recurrence where the groups of its norm are heads: a team of
// threads per head and token.
#pragma once

#include "ops/cuda/gated_norm.cuh"
#include "ops/cuda/step_block.cuh"

namespace replayssm::cuda {

// Channels of a group that a thread has.
inline constexpr int kNormRun = 8;

// Of the outputs of all warps, in shared memory. All threads of the block call.
template <Family kFamily, class Act, int kState>
__device__ void norm_heads(const RecurrentStepParams& p, const StepLaunch& launch,
                           const BlockPlace& b, const BlockShared<kFamily, Act, kState>& shared) {
  const OutputNorm& norm = launch.norm;
  const NormRule rule{launch.head_dim, norm.weight != nullptr, norm.gate_first, norm.activation,
                      norm.eps};
  const int team = launch.norm_team, teams = blockDim.x / team;
  const int at = threadIdx.x % team * kNormRun, count = launch.config.heads * b.window;
#pragma unroll 1
  for (int first = 0; first < count; first += teams) {
    const int n = first + threadIdx.x / team, i = n / launch.config.heads;
    const int head = n - i * launch.config.heads, column = head * launch.head_dim + at;
    const bool exists = n < count && at < launch.head_dim;
    const int64_t token = b.token + i, channel = b.head * launch.head_dim + column;
    float x[1][kNormRun], gate[1][kNormRun], weight[1][kNormRun];
    if (exists) {
      load_run<kNormRun>(norm.z, launch.projected, token * norm.z_stride + channel, gate[0]);
      if (norm.weight)
        load_constants<kNormRun>(norm.weight + (norm.weight_per_group ? at : channel), weight[0]);
      load_run<float, kNormRun>(shared.outputs(i) + column, x[0]);
    }
    gated_norm<kNormRun, 1>(rule, [&](int) { return exists; }, team, nullptr, x, gate, weight);
    if (exists)
      store_run<kNormRun>(p.o, p.o_dtype, token * (launch.heads * launch.head_dim) + channel, x[0]);
  }
}

}  // namespace replayssm::cuda
