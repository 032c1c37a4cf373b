// Sums and maxima over a warp or a block of any number of warps, in a fixed order.
#pragma once

#include "ops/cuda/reduce.cuh"

namespace replayssm::cuda {

// Over aligned teams of `lanes`, a power of two, in each of their lanes.
__device__ inline float warp_sum(float x, int lanes = 32) {
  for (int d = lanes / 2; d > 0; d /= 2) x += __shfl_xor_sync(kAllLanes, x, d);
  return x;
}
__device__ inline float warp_max(float x, int lanes = 32) {
  for (int d = lanes / 2; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, d));
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

// The sum of the lower threads' x; total: that of all. shared: one number per warp.
__device__ inline int block_sum_before(int x, int* shared, int& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = x;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, d);
    if (lane >= d) sum += other;
  }
  __syncthreads();
  if (lane == 31) shared[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    before += w < warp ? shared[w] : 0;
    total += shared[w];
  }
  return before + sum - x;
}

}  // namespace replayssm::cuda
