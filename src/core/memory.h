// Where arrays lie: the host's memory or a device's.
#pragma once

#include <cstdint>

#include "replayssm/types.h"

namespace replayssm {

// How much there is. Bytes.
struct MemoryCapacity {
  int64_t total = 0;
  int64_t free = 0;
};

class Memory {
 public:
  virtual ~Memory() = default;

  // Zeroed, aligned for any vector access. Throws Error when there is no more.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void release(void* data, int64_t bytes) noexcept = 0;

  // These are done in order with all else that is done to this memory.
  // Zeroes `count` pieces of `bytes`, `stride` bytes apart.
  virtual void zero(void* first, int64_t bytes, int64_t stride, int64_t count) = 0;
  virtual void write(void* to, const void* host, int64_t bytes) = 0;
  // `count` weights of core/random_weight.h from position `first` on.
  virtual void write_random(void* to, DType dtype, uint64_t first, int64_t count) = 0;
  virtual void read(void* host, const void* from, int64_t bytes) = 0;
  // Copies `count` pieces of `bytes` within this memory, the strides apart.
  virtual void copy(void* to, int64_t to_stride, const void* from, int64_t from_stride,
                    int64_t bytes, int64_t count) = 0;

  // total = 0: the system hands out memory without a limit that could be planned with.
  virtual MemoryCapacity capacity() const = 0;
};

// The system's memory, backed by huge pages where large.
Memory& host_memory();

}  // namespace replayssm
