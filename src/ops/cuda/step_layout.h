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
  int depth = 2;   // stages of a warp's stream in flight

  friend bool operator==(const LaunchConfig&, const LaunchConfig&) = default;
};

inline constexpr int kMaxWarps = 4;

// Rows of a state that a warp takes at once.
inline constexpr int kPassRows = 8;

// Bytes of a stage: kPassRows rows of fp32.
constexpr int stage_bytes(int64_t state_dim) {
  return static_cast<int>(kPassRows * state_dim * sizeof(float));
}

// Floats of a padded row: four more behind every 32, so that eight lanes reading rows as any element
// type lays them out meet no bank twice.
constexpr int padded_index(int element) { return element + element / 32 * 4; }
constexpr int padded_width(int state_dim) { return padded_index(state_dim); }

// Offsets in bytes into a block's shared memory. `rows`: ring and window rows at most; `columns`:
// the rows of the state that a block owns, over all its heads.
struct StepLayout {
  int rows = 0, columns = 0;
  int key_bytes = 0, value_bytes = 0;  // from row to row
  int stream = 0, barriers = 0;        // the warps' stages
  int keys = 0;                        // [rows] Mamba-2: as in the ring; else fp32, normalised
  int query = 0;                       // [window] padded fp32
  int products = 0;                    // [window, rows] Mamba-2's k q
  int decay = 0;                       // [heads, rows], Kimi Delta: [heads, rows] padded rows
  int log_decay = 0;                   // [heads, rows] (not Kimi Delta)
  int strength = 0;                    // [heads, rows]
  int coefficients = 0;                // [warps, rows]
  int values = 0;                      // [rows, columns] activation dtype
  int scales = 0;                      // [columns] of an 8-bit read copy
  int outputs = 0;                     // [columns] fp32
  int total = 0;
};

constexpr StepLayout step_layout(const RecurrentShape& shape, const RingConfig& ring,
                                 DType activation, const LaunchConfig& config, int window) {
  StepLayout s;
  const int state = static_cast<int>(shape.state_dim), act = int(dtype_bytes(activation));
  const bool vector = shape.family == Family::kKimiDelta;
  const auto take = [&](int bytes) {
    const int at = s.total;
    s.total += (bytes + 15) / 16 * 16;
    return at;
  };
  s.rows = static_cast<int>(ring_rows(ring.buffer_len, ring.max_window));
  s.columns = static_cast<int>(shape.head_dim) * config.heads / config.slices;
  s.key_bytes = shape.family == Family::kMamba2 ? state * act : padded_width(state) * 4;
  s.value_bytes = s.columns * act + 16;
  const int scalars = config.heads * s.rows * 4;
  s.stream = take(config.warps * config.depth * stage_bytes(shape.state_dim));
  s.barriers = take(config.warps * config.depth * 8);
  s.keys = take(s.rows * s.key_bytes);
  s.query = take(window * padded_width(state) * 4);
  s.products = take(window * s.rows * 4);
  s.decay = take(vector ? scalars * padded_width(state) : scalars);
  s.log_decay = take(vector ? 0 : scalars);
  s.strength = take(scalars);
  s.coefficients = take(config.warps * s.rows * 4);
  s.values = take(s.rows * s.value_bytes);
  s.scales = take(s.columns * 4);
  s.outputs = take(s.columns * 4);
  return s;
}

}  // namespace replayssm::cuda
