// Bytes that one decode step moves for the recurrent state of one sequence, from shapes alone.
//
// Over a flush cycle of buffer_len steps a replay route reads the checkpoint at every step, writes
// it once, and reads before its windows of one token 0, 1, ..., buffer_len - 1 rows of history; the
// step that flushes reads the buffer_len rows it folds. Inputs and outputs of a step are left out.
#pragma once

#include <cstdint>

#include "replayssm/ops.h"

namespace replayssm {

constexpr int64_t checkpoint_bytes(const RecurrentShape& shape, DType checkpoint_dtype) {
  return shape.heads * shape.head_dim * shape.state_dim * dtype_bytes(checkpoint_dtype);
}

// One token's v, k, b and g.
constexpr int64_t ring_row_bytes(const RecurrentShape& shape, DType activation_dtype) {
  return (shape.heads * shape.head_dim + shape.key_heads * shape.state_dim) *
             dtype_bytes(activation_dtype) +
         2 * shape.heads * static_cast<int64_t>(sizeof(float));
}

// Means over a flush cycle. What is rewritten counts twice, once read and once written, and is kept
// apart from what is only read, because memory serves the two at different speeds.
struct StateTraffic {
  double read_only = 0;
  double read_modify_write = 0;
  double ring = 0;

  constexpr double total() const { return read_only + read_modify_write + ring; }
  // Seconds at the given bandwidths, in bytes per second (a read-modify-write counts both ways).
  constexpr double seconds(double read_bandwidth, double read_modify_write_bandwidth) const {
    return (read_only + ring) / read_bandwidth + read_modify_write / read_modify_write_bandwidth;
  }
};

// One layer, one sequence, windows of one token.
constexpr StateTraffic state_traffic(const RecurrentShape& shape, Route route, int64_t buffer_len,
                                     DType checkpoint_dtype, DType activation_dtype) {
  const auto state = static_cast<double>(checkpoint_bytes(shape, checkpoint_dtype));
  if (route == Route::kConventional) return {.read_modify_write = 2 * state};
  const auto cycle = static_cast<double>(buffer_len);
  const double rows_read = (cycle - 1) / 2 + 1;
  const auto row = static_cast<double>(ring_row_bytes(shape, activation_dtype));
  return {.read_only = state * (cycle - 1) / cycle,
          .read_modify_write = 2 * state / cycle,
          .ring = (rows_read + 1) * row};
}

}  // namespace replayssm
