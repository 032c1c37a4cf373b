// Blocks of a CUDA kernel on the CPU, one after the other. The threads of a block are coroutines,
// which change over at barriers and where the lanes of a warp meet; shared memory ends where the
// launch says.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <functional>

namespace replayssm::emulation {

// Of the coroutine that runs.
extern uint3 thread_index, block_index;
extern dim3 block_size, grid_size;

// Return when all threads of the block, all lanes of the warp, or so many threads have called with
// the same number (1 to 15). A kernel that waits forever ends the process.
void meet_block();
void meet_warp();
void meet_threads(int barrier, int threads);

// What a lane shows the others of its warp, between two calls of meet_warp.
struct Shown {
  uint32_t words[6];
  const void* pointer;
};
Shown& shown(unsigned lane);

// The number that lane `from` brings.
template <class T>
T exchange(T mine, unsigned from) {
  static_assert(sizeof(T) <= sizeof(Shown::words));
  std::memcpy(shown(thread_index.x % 32).words, &mine, sizeof(T));
  meet_warp();
  T theirs;
  std::memcpy(&theirs, shown(from % 32).words, sizeof(T));
  meet_warp();
  return theirs;
}

// Runs `kernel` in every thread of a grid.
void run(const std::function<void()>& kernel, dim3 grid, int threads, int shared_bytes);

}  // namespace replayssm::emulation
