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

// Most blocks of a cluster.
inline constexpr int kMaxCluster = 16;

// Most tokens of a window.
inline constexpr int kMaxWindow = 16;

// Rows of a state that a warp takes at once: a pass.
inline constexpr int kPassRows = 8;

// Channels that a thread of a fused step convolves at once, and the most taps of its convolution.
inline constexpr int kConvUnit = 4, kFusedTaps = 4;

// Words of 16 bytes that a lane has in flight: so many groups of so many.
inline constexpr int kGroupWords = 8, kGroupsInFlight = 2;

// Vectors that the tensor cores take at once.
inline constexpr int kTileVectors = 4;

// 16-bit parts of a vector that meets a state on the tensor cores: they keep its 24 bits.
inline constexpr int kParts = 3;

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
    if (x >> 32 == 0) return modulo(static_cast<uint32_t>(x));
    const uint32_t high = modulo(static_cast<uint32_t>(x >> 32));
    const uint32_t step = modulo(modulo(0xffffffffu) + 1);  // 2^32
    return modulo(high * step + modulo(static_cast<uint32_t>(x)));
  }
};

// Floats of a padded row: four more behind every 32, so that eight lanes reading rows as any
// element type lays them out meet no bank twice.
constexpr int padded_index(int element) { return element + element / 32 * 4; }
constexpr int padded_width(int state_dim) { return padded_index(state_dim); }

// Bytes between the parts of two vectors: such that the lanes of a tile meet no bank twice.
constexpr int parts_stride(int state_dim) { return kParts * 2 * state_dim + 64; }

// What a block keeps in shared memory: offsets in bytes. Rows are those of ring and window. The
// sizes are what the launch allows; a sequence may use less.
struct StepLayout {
  int rows = 0;
  int window = 0;   // tokens
  int columns = 0;  // rows of the state that the block owns, over all its heads
  int per_row = 0;  // coefficients of a row: one per token, four at a time

  int stream = 0;  // [warps] words that lanes have in flight
  int keys = 0;    // [rows], then queries [window], as they came
  int values = 0;  // [rows, columns], as they came
  // Floats from here on.
  int strengths = 0;  // [heads, rows]
  int decays = 0;     // [heads, rows]; Kimi Delta: [heads, rows] padded rows
  int factors = 0;  // delta: 1 / |k|, [rows], 1 / |q|, [window]; Mamba-2: log decays, [heads, rows]
  int products = 0;      // Mamba-2: [rows, per_row]
  int coefficients = 0;  // [heads, rows, per_row]
  // Mamba-2's heads share their targets, the queries.
  int targets = 0;        // [heads, window] padded rows
  int parts = 0;          // [heads, window], parts_stride apart, 16-bit numbers
  int part_scales = 0;    // [heads, window]
  int output_scales = 0;  // Mamba-2: [heads, window]
  int row_scales = 0;     // of an 8-bit read copy: [columns]
  int outputs = 0;        // [window, columns]
  int total = 0;
};

// read: the type of the states that are read without being folded.
constexpr StepLayout step_layout(const RecurrentShape& shape, const RingConfig& ring,
                                 DType activation, DType read, const LaunchConfig& config) {
  StepLayout s;
  const auto take = [&](int bytes) {
    const int at = s.total;
    s.total += (bytes + 15) / 16 * 16;
    return at;
  };
  const bool mamba = shape.family == Family::kMamba2;
  const int state = static_cast<int>(shape.state_dim), padded = padded_width(state);
  const int act = static_cast<int>(dtype_bytes(activation));
  s.rows = static_cast<int>(ring_rows(ring.buffer_len, ring.max_window));
  s.window = ring.max_window;
  s.columns = static_cast<int>(shape.head_dim) * config.heads / config.slices;
  s.per_row = s.window == 1 ? 1 : (s.window + 3) / 4 * 4;
  const int gates = 4 * config.heads * s.rows, targets = (mamba ? 1 : config.heads) * s.window;
  s.stream = take(config.warps * 32 * kGroupsInFlight * kGroupWords * 16);
  s.keys = take((s.rows + s.window) * state * act);
  s.values = take(s.rows * s.columns * act);
  s.strengths = take(gates);
  s.decays = take(shape.family == Family::kKimiDelta ? gates * padded : gates);
  s.factors = take(mamba ? gates : 4 * (s.rows + s.window));
  if (mamba) s.products = take(4 * s.rows * s.per_row);
  s.coefficients = take(gates * s.per_row);
  s.targets = take(4 * targets * padded);
  if (read != DType::kFloat32) s.parts = take(targets * parts_stride(state));
  s.part_scales = take(4 * targets);
  if (mamba) s.output_scales = take(4 * config.heads * s.window);
  if (dtype_bytes(read) == 1) s.row_scales = take(4 * s.columns);
  s.outputs = take(4 * s.window * s.columns);
  return s;
}

}  // namespace replayssm::cuda
