// A warp's own stream of global memory through a ring of stages in shared memory. One lane issues
// bulk copies far ahead of their use, so that no register waits for memory.
#pragma once

#include <cstdint>

namespace replayssm::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}
__device__ inline void copy_async_4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}
__device__ inline void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

class WarpStream {
 public:
  // Fetches `bytes` (a multiple of 16) from `source` through `depth` stages in `buffers`; the last
  // stage may be shorter. `barriers`: one per stage, initialised here. All lanes call.
  __device__ WarpStream(const void* source, int bytes, int stage_bytes, int depth, char* buffers,
                        uint64_t* barriers)
      : source_(static_cast<const char*>(source)),
        bytes_(bytes),
        stage_bytes_(stage_bytes),
        depth_(depth),
        buffers_(buffers),
        barriers_(barriers) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < depth; ++i)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers + i))
                     : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
#endif
    for (int i = 0; i < depth; ++i) fetch(i);
    __syncwarp();
  }

  // The current stage's data, once it is here.
  __device__ const char* wait() {
#if __CUDA_ARCH__ >= 900
    const uint32_t barrier = shared_address(barriers_ + index_);
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n"
        "}\n" ::"r"(barrier),
        "r"(parity_)
        : "memory");
#else
    copy_async_wait();
    __syncwarp();
#endif
    return buffers_ + index_ * stage_bytes_;
  }

  // All lanes have read the current stage: its buffer takes the data `depth` stages ahead.
  __device__ void release() {
    __syncwarp();
    fetch(index_);
    if (++index_ == depth_) {
      index_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  __device__ void fetch(int index) {
    if (bytes_ <= 0) return;
    const int count = min(bytes_, stage_bytes_);
    char* target = buffers_ + index * stage_bytes_;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
      const uint32_t barrier = shared_address(barriers_ + index);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(count)
                   : "memory");
      uint64_t policy;
      asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
          "[%1], %2, [%3], %4;" ::"r"(shared_address(target)),
          "l"(source_), "r"(count), "r"(barrier), "l"(policy)
          : "memory");
    }
#else
    for (int i = threadIdx.x % 32 * 16; i < count; i += 32 * 16)
      copy_async_16(target + i, source_ + i);
#endif
    source_ += count;
    bytes_ -= count;
  }

  const char* source_;
  int bytes_, stage_bytes_, depth_;
  char* buffers_;
  uint64_t* barriers_;
  int index_ = 0, parity_ = 0;
};

}  // namespace replayssm::cuda
