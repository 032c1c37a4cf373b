// Copies that are complete at once, and kernels that do not overlap.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/check.h"

namespace replayssm::cuda {

inline void copy_async_16(void* shared, const void* global) {
  REPLAYSSM_CHECK(reinterpret_cast<uintptr_t>(shared) % 16 == 0 &&
                      reinterpret_cast<uintptr_t>(global) % 16 == 0,
                  "16 bytes from or to ", shared, ", ", global);
  std::memcpy(shared, global, 16);
}
inline void copy_async_16_or_zero(void* shared, const void* global, bool valid) {
  if (valid) return copy_async_16(shared, global);
  std::memset(shared, 0, 16);
}
inline void copy_async_4(void* shared, const void* global) { std::memcpy(shared, global, 4); }
inline void copy_async_commit() {}
inline void copy_async_wait_all() {}
template <int kGroups>
void copy_async_wait_but() {}
inline void prefetch_line(const void*) {}
inline void release_successor() {}
inline void wait_for_predecessor() {}

}  // namespace replayssm::cuda
