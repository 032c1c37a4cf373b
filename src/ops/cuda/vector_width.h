// Whether rows may be read 16 bytes at a time.
#pragma once

#include <cstdint>

namespace replayssm::cuda {

// Rows `stride_bytes` apart from `data` on start at multiples of 16 bytes. Null: nobody reads them.
inline bool rows_aligned(const void* data, int64_t stride_bytes = 0) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

}  // namespace replayssm::cuda
