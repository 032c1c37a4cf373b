// What stands between an MLP's two products.
#pragma once

#include "ops/cuda/activations.cuh"

namespace replayssm::cuda {

__device__ inline float swiglu(float gate, float scale, float up) {
  return up * silu(gate * scale);
}
__device__ inline float relu_squared(float x, float scale) {
  const float y = x > 0 ? x * scale : 0.0f;
  return y * y;
}

}  // namespace replayssm::cuda
