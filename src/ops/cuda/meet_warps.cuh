// Barriers of some of a block's warps.
#pragma once

namespace replayssm::cuda {

// Returns when so many threads have called with the same number, 1 to 15.
__device__ inline void meet_warps(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace replayssm::cuda
