// Sums and maxima over a warp or a block of any number of warps, in a fixed order.
#pragma once

#include "ops/cuda/reduce.cuh"

namespace replayssm::cuda {

// Over aligned teams of `lanes`, a power of two, in each of their lanes.
__device__ inline float warp_sum(float x, int lanes = 32) {
  for (int d = lanes / 2; d > 0; d /= 2) x += __shfl_xor_sync(kAllLanes, x, d);
  return x;
}
__device__ inline float warp_max(float x) {
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, d));
  return x;
}

// Over the block, in each thread. shared: one float per warp, not in use before the next barrier.
__device__ inline float block_sum(float x, float* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  x = warp_sum(x);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return warp_sum(lane < static_cast<int>(blockDim.x) / 32 ? shared[lane] : 0.0f);
}

}  // namespace replayssm::cuda
