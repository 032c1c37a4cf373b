// Blocks that run at the same time and read each other's shared memory.
#pragma once

#include "ops/cuda/async_copy.cuh"

namespace replayssm::cuda {

// What all threads of the cluster wrote before arriving is seen behind the wait.
__device__ inline void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A float in the shared memory of block `rank` of the cluster, where this block has `local`.
__device__ inline float load_from_block(const float* local, int rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  float x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(local)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
#else
  return *local;
#endif
}

}  // namespace replayssm::cuda
