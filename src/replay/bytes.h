// Bytes that a call of the recurrence moves for one sequence of one layer, from shapes alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/bandwidth.h"
#include "replay/cursor.h"
#include "replayssm/ops.h"

namespace replayssm {

constexpr int64_t state_elements(const RecurrentShape& shape) {
  return shape.heads * shape.head_dim * shape.state_dim;
}

constexpr int64_t checkpoint_bytes(const RecurrentShape& shape, DType checkpoint_dtype) {
  return state_elements(shape) * dtype_bytes(checkpoint_dtype);
}

// A read copy: the values, and a scale per row for 8-bit types.
constexpr int64_t read_copy_bytes(const RecurrentShape& shape, DType dtype) {
  const int64_t rows = dtype_bytes(dtype) == 1 ? shape.heads * shape.head_dim : 0;
  return state_elements(shape) * dtype_bytes(dtype) + rows * static_cast<int64_t>(sizeof(float));
}

// One token's v and k, and its gates: b and g, or b and Kimi Delta's row of raw gates.
constexpr int64_t ring_row_bytes(const RecurrentShape& shape, DType activation_dtype) {
  const bool channels = shape.family == Family::kKimiDelta;
  const int64_t activations = shape.heads * shape.head_dim + shape.key_heads * shape.state_dim +
                              (channels ? shape.heads * shape.state_dim : 0);
  return activations * dtype_bytes(activation_dtype) +
         (channels ? 1 : 2) * shape.heads * static_cast<int64_t>(sizeof(float));
}

// One token's inputs: what its ring row takes, and q.
constexpr int64_t token_input_bytes(const RecurrentShape& shape, DType activation_dtype) {
  return ring_row_bytes(shape, activation_dtype) +
         shape.key_heads * shape.state_dim * dtype_bytes(activation_dtype);
}

constexpr int64_t token_output_bytes(const RecurrentShape& shape, DType o_dtype) {
  return shape.heads * shape.head_dim * dtype_bytes(o_dtype);
}

// Means over a flush cycle. What is read, what is read and written back (it counts twice) and what
// is only written are kept apart, because memory serves them at different speeds.
struct StateTraffic {
  double read_only = 0;
  double read_modify_write = 0;
  double write_only = 0;
  double ring = 0;
  double inputs = 0;
  double outputs = 0;

  constexpr double state() const { return read_only + read_modify_write + write_only; }
  // Inputs and outputs left out: on a CPU a layer's neighbours hand them over in cache.
  constexpr double total() const { return state() + ring; }
  // Seconds for total() at the given bandwidths.
  constexpr double seconds(const Bandwidth& bandwidth) const {
    return (read_only + ring) / bandwidth.read + read_modify_write / bandwidth.read_modify_write +
           write_only / bandwidth.write;
  }
};

constexpr StateTraffic operator*(const StateTraffic& x, double times) {
  return {.read_only = x.read_only * times,
          .read_modify_write = x.read_modify_write * times,
          .write_only = x.write_only * times,
          .ring = x.ring * times,
          .inputs = x.inputs * times,
          .outputs = x.outputs * times};
}

// How a sequence is decoded.
struct DecodeSchedule {
  Route route = Route::kOutputOnly;
  int64_t buffer_len = 16;
  int64_t window = 1;    // tokens of every step
  int64_t accepted = 1;  // of which this many are committed, 1 .. window
  DType checkpoint_dtype = DType::kFloat32;
  DType activation_dtype = DType::kFloat32;
  DType o_dtype = DType::kFloat32;
  std::optional<DType> read_copy = std::nullopt;
};

// Steps of one flush cycle of a replay route.
constexpr int64_t cycle_steps(const DecodeSchedule& schedule) {
  return std::max<int64_t>(0, schedule.buffer_len - schedule.window) / schedule.accepted + 1;
}

namespace detail {

constexpr StateTraffic window_traffic(const RecurrentShape& shape, const DecodeSchedule& s) {
  const auto window = static_cast<double>(s.window);
  return {.inputs = window * static_cast<double>(token_input_bytes(shape, s.activation_dtype)),
          .outputs = window * static_cast<double>(token_output_bytes(shape, s.o_dtype))};
}

}  // namespace detail

// One step. A replay route reads checkpoint or read copy at all steps of a cycle but one, which
// folds: it reads and writes the checkpoint, writes the copy and reads the rows that it folds.
// Every step reads the rows of history and writes its window.
constexpr StateTraffic state_traffic(const RecurrentShape& shape, const DecodeSchedule& s) {
  const auto checkpoint = static_cast<double>(checkpoint_bytes(shape, s.checkpoint_dtype));
  const auto copy = s.read_copy ? static_cast<double>(read_copy_bytes(shape, *s.read_copy)) : 0;
  StateTraffic traffic = detail::window_traffic(shape, s);
  if (s.route == Route::kConventional) {
    traffic.read_modify_write = 2 * checkpoint;
    traffic.write_only = copy;
    return traffic;
  }
  const auto steps = static_cast<double>(cycle_steps(s));
  const double rows_read = static_cast<double>(s.accepted) * (steps + 1) / 2;
  traffic.read_only = (s.read_copy ? copy : checkpoint) * (steps - 1) / steps;
  traffic.read_modify_write = 2 * checkpoint / steps;
  traffic.write_only = copy / steps;
  traffic.ring = (rows_read + static_cast<double>(s.window)) *
                 static_cast<double>(ring_row_bytes(shape, s.activation_dtype));
  return traffic;
}

// One step of SnapshotStepParams: reads one state, writes one per token.
constexpr StateTraffic snapshot_traffic(const RecurrentShape& shape, const DecodeSchedule& s) {
  const auto state = static_cast<double>(checkpoint_bytes(shape, s.checkpoint_dtype));
  StateTraffic traffic = detail::window_traffic(shape, s);
  traffic.read_only = state;
  traffic.write_only = state * static_cast<double>(s.window);
  return traffic;
}

// A prefill of s.window tokens.
constexpr StateTraffic prefill_traffic(const RecurrentShape& shape, const DecodeSchedule& s) {
  DecodeSchedule conventional = s;
  conventional.route = Route::kConventional;
  return state_traffic(shape, conventional);
}

// A fold of `rows` ring rows in place.
constexpr StateTraffic fold_traffic(const RecurrentShape& shape, const DecodeSchedule& s,
                                    int64_t rows) {
  StateTraffic traffic;
  traffic.read_modify_write = 2 * static_cast<double>(checkpoint_bytes(shape, s.checkpoint_dtype));
  traffic.write_only = s.read_copy ? static_cast<double>(read_copy_bytes(shape, *s.read_copy)) : 0;
  traffic.ring = static_cast<double>(rows * ring_row_bytes(shape, s.activation_dtype));
  return traffic;
}

// A convolution over a window of decoded tokens: the taps before it are read from the kept inputs,
// the window joins them.
constexpr StateTraffic conv_traffic(int64_t channels, const RingConfig& ring, int64_t window,
                                    DType activation_dtype) {
  const int64_t row = channels * dtype_bytes(activation_dtype);
  return {.ring = static_cast<double>((ring.conv_kernel - 1 + window) * row),
          .inputs = static_cast<double>(window * channels) * sizeof(float),
          .outputs = static_cast<double>(window * row)};
}

// The same where the inputs before the window are kept in order: all of them are written back.
constexpr StateTraffic shifting_conv_traffic(int64_t channels, int64_t conv_kernel, int64_t window,
                                             DType activation_dtype) {
  const int64_t row = channels * dtype_bytes(activation_dtype);
  return {.read_modify_write = 2 * static_cast<double>((conv_kernel - 1) * row),
          .inputs = static_cast<double>(window * channels) * sizeof(float),
          .outputs = static_cast<double>(window * row)};
}

}  // namespace replayssm
