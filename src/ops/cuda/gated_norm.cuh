// The gated norm of groups, each in a team of threads: a power of two, a part of a warp or a block.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/norms.h"
#include "ops/cuda/reduce.cuh"

namespace replayssm::cuda {

struct NormRule {
  int group_dim = 0;
  bool has_weight = false, gate_first = false;
  GateActivation activation = GateActivation::kSilu;
  float eps = 0;

  // What makes a group with this sum of squares one of mean square 1.
  __device__ float scale(float sum) const {
    return rsqrtf(__fadd_rn(__fdividef(sum, static_cast<float>(group_dim)), eps));
  }
};

// Gates become factors, values gated ones where the gate comes first. Adds their squares to the
// sum. A zero stays one whatever its gate: padding has gates of any kind.
template <int kVec>
__device__ inline float gate_run(const NormRule& rule, float (&x)[kVec], float (&gate)[kVec],
                                 float sum = 0) {
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    const float z = gate[e];
    gate[e] = rule.activation == GateActivation::kSilu ? silu(z) : sigmoid(z);
    if (x[e] == 0) gate[e] = 0;
    if (rule.gate_first) x[e] *= gate[e];
    sum = fmaf(x[e], x[e], sum);
  }
  return sum;
}
// gate: factors.
template <int kVec>
__device__ inline void scale_run(const NormRule& rule, float scale, float (&x)[kVec],
                                 const float (&gate)[kVec], const float (&weight)[kVec]) {
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    if (rule.has_weight) x[e] = x[e] * scale * weight[e];
    if (!rule.gate_first) x[e] *= gate[e];
  }
}

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
// becomes the result.
template <int kVec, int kChunks, class Active>
__device__ inline void gated_norm(const NormRule& rule, Active&& active, int team, float* shared,
                                  float (&x)[kChunks][kVec], float (&gate)[kChunks][kVec],
                                  const float (&weight)[kChunks][kVec]) {
  float sum = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    if (active(c)) sum = gate_run(rule, x[c], gate[c], sum);
  const float scale = rule.scale(team_sum(sum, team, shared));
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    if (active(c)) scale_run(rule, scale, x[c], gate[c], weight[c]);
}

}  // namespace replayssm::cuda
