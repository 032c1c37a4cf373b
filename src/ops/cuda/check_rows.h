// Checks of rows in memory, and whether they may be read many elements at a time.
#pragma once

#include "core/check.h"
#include "ops/check_params.h"
#include "ops/cuda/dense.h"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {

inline void check_float(const char* name, DType dtype) {
  if (dtype_bytes(dtype) < 2)
    fail(name, ": expected float32, float16 or bfloat16, got ", dtype_name(dtype));
}

inline void check_count(const char* name, int64_t count, int64_t least) {
  if (count < least) fail(name, ": expected at least ", least, ", got ", count);
}

// InRows or OutRows.
template <class Rows>
concept RowsLike = requires(const Rows& rows) { rows.stride* dtype_bytes(rows.dtype); };

template <RowsLike Rows>
void check_rows(const char* name, const Rows& rows, int64_t count, int64_t width) {
  check_float(name, rows.dtype);
  if (count == 0) return;
  check_pointer(name, rows.data, dtype_bytes(rows.dtype));
  if (count > 1 && rows.stride < width)
    fail(name, ": expected a stride of at least ", width, ", got ", rows.stride);
}

// Every row starts at a multiple of 16 bytes.
template <RowsLike Rows>
bool rows_aligned(const Rows& rows) {
  return rows_aligned(rows.data, rows.stride * dtype_bytes(rows.dtype));
}

// Blocks of `threads` for `count` of them.
inline unsigned blocks_for(int64_t count, int threads) {
  const int64_t blocks = (count + threads - 1) / threads;
  if (blocks > INT32_MAX) fail("rows: expected fewer, got ", count, " runs of elements");
  return static_cast<unsigned>(blocks);
}

}  // namespace replayssm::cuda
