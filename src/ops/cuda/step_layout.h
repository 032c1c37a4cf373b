// How a decode step is cut into blocks, and what a block keeps in shared memory. Pure functions of
// shapes, shared by host and device.
#pragma once

#include <cstdint>

#include "replay/cursor.h"
#include "replayssm/ops.h"

namespace replayssm::cuda {

// A block owns some heads of a key group, or a slice of one head's rows, of one sequence.
struct LaunchConfig {
  int heads = 1;   // value heads of a block; more than one only without slices
  int slices = 1;  // pieces that a head's rows are cut into
  int warps = 4;   // at most kMaxWarps

  friend bool operator==(const LaunchConfig&, const LaunchConfig&) = default;
};

inline constexpr int kMaxWarps = 4;

// Rows of a state that a warp takes at once.
inline constexpr int kPassRows = 8;

// Words of 16 bytes that a lane has in flight: so many groups of so many.
inline constexpr int kWords = 8, kDepth = 2;

// Division of small numbers by a number known on the host.
struct FastDivide {
  uint32_t divisor = 1, magic = 0;

  constexpr FastDivide() = default;
  constexpr explicit FastDivide(uint32_t by)
      : divisor(by), magic(static_cast<uint32_t>((uint64_t{1} << 32) / by)) {}

  // x < 2^32.
  constexpr uint32_t modulo(uint32_t x) const {
    if (divisor == 1) return 0;
    const auto quotient = static_cast<uint32_t>((uint64_t{x} * magic) >> 32);
    const uint32_t rest = x - quotient * divisor;  // the quotient is at most one too small
    return rest >= divisor ? rest - divisor : rest;
  }
  constexpr uint32_t divide(uint32_t x) const {
    if (divisor == 1) return x;
    const auto quotient = static_cast<uint32_t>((uint64_t{x} * magic) >> 32);
    return quotient + (x - quotient * divisor >= divisor ? 1 : 0);
  }
  // Any x; divisor < 2^16.
  constexpr uint32_t modulo64(uint64_t x) const {
    const uint32_t high = modulo(static_cast<uint32_t>(x >> 32));
    const uint32_t step = modulo(modulo(0xffffffffu) + 1);  // 2^32
    return modulo(high * step + modulo(static_cast<uint32_t>(x)));
  }
};

// Floats of a padded row: four more behind every 32, so that eight lanes reading rows as any
// element type lays them out meet no bank twice.
constexpr int padded_index(int element) { return element + element / 32 * 4; }
constexpr int padded_width(int state_dim) { return padded_index(state_dim); }

// Offsets in bytes into a block's shared memory. `rows`: ring and window rows at most; `columns`:
// the rows of the state that a block owns, over all its heads.
struct StepLayout {
  int rows = 0, columns = 0;
  int stream = 0;                      // [threads] rings of words
  int key_bytes = 0, value_bytes = 0;  // from row to row
  int keys = 0, queries = 0;           // [rows], [window]: as they came
  int values = 0;                      // [rows, columns] as they came
  int decays = 0;                      // Kimi Delta: [heads, rows] padded rows
  int scales = 0;                      // [columns] of an 8-bit read copy
  int outputs = 0;                     // [columns] fp32
  int scratch = 0, scratch_bytes = 0;  // [warps]
  int total = 0;
};

// What a warp knows of its current head: four numbers per row, the walked query in fp32 and, for
// states of 16 and 8 bits, in three 16-bit parts.
constexpr int scratch_bytes(int rows, int state_dim, DType read) {
  return (4 * 4 * rows + 15) / 16 * 16 + padded_width(state_dim) * 4 +
         (read == DType::kFloat32 ? 0 : 3 * 2 * state_dim);
}

// read: the type of the states that are read without being folded.
constexpr StepLayout step_layout(const RecurrentShape& shape, const RingConfig& ring,
                                 DType activation, DType read, const LaunchConfig& config,
                                 int window) {
  StepLayout s;
  const int state = static_cast<int>(shape.state_dim);
  const int act = static_cast<int>(dtype_bytes(activation));
  const auto take = [&](int bytes) {
    const int at = s.total;
    s.total += (bytes + 15) / 16 * 16;
    return at;
  };
  s.rows = static_cast<int>(ring_rows(ring.buffer_len, ring.max_window));
  s.columns = static_cast<int>(shape.head_dim) * config.heads / config.slices;
  s.key_bytes = state * act;
  s.value_bytes = s.columns * act;
  s.scratch_bytes = scratch_bytes(s.rows, state, read);
  s.stream = take(config.warps * 32 * kDepth * kWords * 16);
  s.keys = take(s.rows * s.key_bytes);
  s.queries = take(window * s.key_bytes);
  s.values = take(s.rows * s.value_bytes);
  if (shape.family == Family::kKimiDelta)
    s.decays = take(config.heads * s.rows * 4 * padded_width(state));
  s.scales = take(s.columns * 4);
  s.outputs = take(s.columns * 4);
  s.scratch = take(config.warps * s.scratch_bytes);
  return s;
}

}  // namespace replayssm::cuda
