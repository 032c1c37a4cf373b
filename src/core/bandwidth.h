// The memory bandwidth that a thread pool gets: the yardstick of the benchmarks.
#pragma once

#include <cstdint>

#include "core/buffer.h"
#include "core/thread_pool.h"

namespace replayssm {

// Bytes per second; a byte that is read and written back counts twice. `write` is that of stores
// that bypass the caches, where the machine has such.
struct Bandwidth {
  double read = 0;
  double read_modify_write = 0;
  double write = 0;
};

// Streams over `buffer` once each way per call of sample().
class BandwidthProbe {
 public:
  BandwidthProbe(int64_t bytes, ThreadPool& pool);

  Bandwidth sample();
  int64_t bytes() const { return buffer_.bytes(); }

 private:
  Buffer buffer_;
  ThreadPool& pool_;
};

}  // namespace replayssm
