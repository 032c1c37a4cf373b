// The gated norm of groups, each in a team of threads: a power of two, a part of a warp or a block.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/reduce.cuh"

namespace replayssm::cuda {

struct NormRule {
  int group_dim = 0;
  bool has_weight = false, gate_first = false;
  GateActivation activation = GateActivation::kSilu;
  float eps = 0;
};

// The sum over a team, in each of its threads. shared: a float per warp, for teams beyond one.
__device__ inline float team_sum(float x, int team, float* shared) {
  for (int d = min(team, 32) / 2; d > 0; d /= 2) x += __shfl_xor_sync(kAllLanes, x, d);
  if (team <= 32) return x;
  const int warp = threadIdx.x / 32, warps = team / 32;
  if (threadIdx.x % 32 == 0) shared[warp] = x;
  __syncthreads();
  x = static_cast<int>(threadIdx.x % 32) < warps ? shared[threadIdx.x % 32] : 0.0f;
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kAllLanes, x, d);
  return x;
}

// A thread's share of a group: kChunks runs of kVec channels, those for which active(chunk). x
// becomes the result. A zero stays one whatever its gate: padding has gates of any kind.
template <int kVec, int kChunks, class Active>
__device__ inline void gated_norm(const NormRule& rule, Active&& active, int team, float* shared,
                                  float (&x)[kChunks][kVec], float (&gate)[kChunks][kVec],
                                  const float (&weight)[kChunks][kVec]) {
  float sum = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (!active(c)) continue;
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const float z = gate[c][e];
      gate[c][e] = rule.activation == GateActivation::kSilu ? silu(z) : sigmoid(z);
      if (x[c][e] == 0) gate[c][e] = 0;
      if (rule.gate_first) x[c][e] *= gate[c][e];
      sum = fmaf(x[c][e], x[c][e], sum);
    }
  }
  const float mean = __fdividef(team_sum(sum, team, shared), static_cast<float>(rule.group_dim));
  const float scale = rsqrtf(__fadd_rn(mean, rule.eps));
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (!active(c)) continue;
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      if (rule.has_weight) x[c][e] = x[c][e] * scale * weight[c][e];
      if (!rule.gate_first) x[c][e] *= gate[c][e];
    }
  }
}

}  // namespace replayssm::cuda
