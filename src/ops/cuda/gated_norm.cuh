// The gated norm of a group of channels that a team of threads shares: a power of two, a part of a
// warp or a block.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/reduce.cuh"
#include "replayssm/ops.h"

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

// Four in turn, fours added.
template <int kVec>
__device__ inline float sum_of_squares(const float* x) {
  if constexpr (kVec > 4) {
    return sum_of_squares<kVec / 2>(x) + sum_of_squares<kVec / 2>(x + kVec / 2);
  } else {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum = fmaf(x[e], x[e], sum);
    return sum;
  }
}

// Gates become factors, values gated ones where the gate comes first. Returns the sum of their
// squares. A zero stays one whatever its gate: padding has gates of any kind.
template <int kVec>
__device__ inline float gate_values(const NormRule& rule, float (&x)[kVec], float (&gate)[kVec]) {
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    const float z = gate[e];
    gate[e] = rule.activation == GateActivation::kSilu ? silu(z) : sigmoid(z);
    if (x[e] == 0) gate[e] = 0;
    if (rule.gate_first) x[e] *= gate[e];
  }
  return sum_of_squares<kVec>(x);
}
// gate: factors.
template <int kVec>
__device__ inline void scale_values(const NormRule& rule, float scale, float (&x)[kVec],
                                    const float (&gate)[kVec], const float (&weight)[kVec]) {
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    if (rule.has_weight) x[e] = x[e] * scale * weight[e];
    if (!rule.gate_first) x[e] *= gate[e];
  }
}

// The sum over a team whose threads have eight channels each, in all of them. shared: a float per
// warp, for teams beyond one.
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
// The same of up to 32 lanes that have four each.
__device__ inline float quad_team_sum(float x, int team) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  for (int d = team / 2; d > 1; d /= 2) x += __shfl_xor_sync(kAllLanes, x, d);
  return x;
}

}  // namespace replayssm::cuda
