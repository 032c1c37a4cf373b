// Write strengths and log decays of one token and head, fp32 functions as exact as the library's.
#pragma once

#include "ops/cuda/activations.cuh"

namespace replayssm::cuda {

// log(1 + e^x), with a relative precision that does not suffer where it is small; x itself from
// where the two are equal in fp32.
__device__ inline float exact_softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// NaN passes both comparisons.
__device__ inline float mamba2_strength(float dt, float bias, float min, float max) {
  const float b = exact_softplus(dt + bias);
  return b < min ? min : max < b ? max : b;
}
__device__ inline float delta_log_decay(float alpha, float bias, float a) {
  return a * exact_softplus(alpha + bias);
}

}  // namespace replayssm::cuda
