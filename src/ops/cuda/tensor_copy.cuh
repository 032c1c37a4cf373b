// Tiles of matrices from global to shared memory by the copy engine of sm_90 devices, and the
// barriers in shared memory that count them in.
#pragma once

#include <cuda.h>

#include "ops/cuda/async_copy.cuh"

namespace replayssm::cuda {

// Barriers are 8 bytes of shared memory, named by their addresses there.
__device__ inline void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Initialised barriers are those of the copy engine too.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives; the phase ends no sooner than `bytes` more have been copied.
__device__ inline void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Until the phase of that parity has ended; before the first, the odd one has.
__device__ inline void wait_phase(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred ended;\n"
      "again:\nmbarrier.try_wait.parity.shared.b64 ended, [%0], %1;\n@!ended bra again;\n}\n" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

// How long copies are to stay in the L2 cache.
__device__ inline uint64_t read_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline uint64_t read_often() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The tile of the map's box from (row, column) on; what is outside of the matrix is zero.
__device__ inline void copy_tile(uint32_t shared, const CUtensorMap& map, int row, int column,
                                 uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

}  // namespace replayssm::cuda
