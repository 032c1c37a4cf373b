#include "core/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/half.h"
#include "core/random_weight.h"

namespace replayssm {
namespace {

template <class T>
void write_weights(T* to, uint64_t first, int64_t count) {
  constexpr int kRun = 1024;
  int16_t parts[kRun];
  while (count > 0) {
    const auto skipped = static_cast<int>(first % 4);
    const auto run = static_cast<int>(std::min<int64_t>(count, kRun - skipped));
    for (int i = 0; i < skipped + run; i += 4) {
      const uint64_t bits = random_weight_bits((first + i) / 4);
      for (int e = 0; e < 4; ++e) parts[i + e] = random_weight_part(bits, e);
    }
    for (int i = 0; i < run; ++i) {
      const auto weight = from_float<bf16>(random_weight(parts[skipped + i]));
      if constexpr (std::is_same_v<T, bf16>) {
        to[i] = weight;
      } else {
        to[i] = from_float<T>(to_float(weight));
      }
    }
    to += run, first += run, count -= run;
  }
}

class HostMemory final : public Memory {
 public:
  void* allocate(int64_t bytes) override {
    void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) fail("out of memory: ", bytes, " bytes refused by the system");
    constexpr int64_t kHugePage = 2 << 20;
    if (bytes >= kHugePage) madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    return data;
  }
  void release(void* data, int64_t bytes) noexcept override {
    munmap(data, static_cast<size_t>(bytes));
  }
  void zero(void* first, int64_t bytes, int64_t stride, int64_t count) override {
    for (int64_t i = 0; i < count; ++i)
      std::memset(static_cast<std::byte*>(first) + i * stride, 0, static_cast<size_t>(bytes));
  }
  void write(void* to, const void* host, int64_t bytes) override {
    std::memcpy(to, host, static_cast<size_t>(bytes));
  }
  void write_random(void* to, DType dtype, uint64_t first, int64_t count) override {
    dispatch_float(dtype, [&]<class T>() { write_weights(static_cast<T*>(to), first, count); });
  }
  void read(void* host, const void* from, int64_t bytes) override {
    std::memcpy(host, from, static_cast<size_t>(bytes));
  }
  void copy(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t bytes,
            int64_t count) override {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(static_cast<std::byte*>(to) + i * to_stride,
                  static_cast<const std::byte*>(from) + i * from_stride,
                  static_cast<size_t>(bytes));
    }
  }
  MemoryCapacity capacity() const override { return {}; }
};

}  // namespace

Memory& host_memory() {
  static HostMemory memory;  // without state
  return memory;
}

}  // namespace replayssm
