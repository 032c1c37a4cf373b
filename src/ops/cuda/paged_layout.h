// How a paged decode step is cut into blocks, and what a block keeps in shared memory. Pure
// functions of shapes, shared by host and device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cuda/launch.h"
#include "ops/cuda/step_layout.h"
#include "ops/paged.h"

namespace replayssm::cuda {

inline constexpr int kPagedMaxWarps = 8;

// Tokens of a window whose outputs a lane holds at once.
inline constexpr int kPagedChunk = 4;

// Rows of a state that a lane takes: 64 numbers.
constexpr int paged_lane_rows(int state_dim) { return 64 / (state_dim / 8); }

// Offsets in floats into a block's shared memory.
struct PagedLayout {
  int window = 0, padded_window = 0;  // tokens; rounded up
  int queries = 0, keys = 0;          // [window] padded rows: queries; Gated Delta's new keys
  int key_query = 0, key_key = 0;     // [ring + window, padded_window] products of keys with both
  int weights = 0;                    // [heads, ring + 1] of cached rows
  int decay = 0;                      // [heads] of the state
  int prefix = 0, beta = 0;           // [heads, padded_window]
  int within = 0;                     // [heads, window, padded_window] of rows within the window
  int corrected = 0;                  // [window, rows] Gated Delta's d
  int total = 0;
};

constexpr PagedLayout paged_layout(const PagedStep& p, int heads, int rows) {
  PagedLayout l;
  const auto take = [&](int64_t floats) {
    const int at = l.total;
    l.total += static_cast<int>((floats + 3) / 4 * 4);
    return at;
  };
  const int ring = static_cast<int>(p.ring), width = padded_width(static_cast<int>(p.state_dim));
  const bool single = p.rule == REPLAYSSM_PAGED_SINGLE, delta = p.family != REPLAYSSM_MAMBA2;
  l.window = single ? 1 : static_cast<int>(p.max_window);
  l.padded_window = single ? 1 : (l.window + 7) / 8 * 8;
  if (!single) {
    l.queries = take(l.window * width);
    if (delta) l.keys = take(l.window * width);
  }
  l.key_query = take((ring + l.window) * l.padded_window);
  if (delta) l.key_key = take((ring + l.window) * l.padded_window);
  l.weights = take(heads * (ring + 1));
  l.decay = take(heads);
  l.prefix = take(heads * l.padded_window);
  if (delta) l.beta = take(heads * l.padded_window);
  if (!single) {
    l.within = take(heads * l.window * l.padded_window);
    if (delta && l.window > kPagedChunk) l.corrected = take(l.window * rows);
  }
  return l;
}

struct PagedLaunch {
  int heads = 1;   // of a block, of one key head; more than one only without slices
  int slices = 1;  // pieces that a head's rows are cut into
  int warps = 1;
  int rows = 0;   // of the state that a block owns
  int group = 1;  // heads of a key head
  PagedLayout layout;
};

// The largest blocks that still give three of four multiprocessors one, else the smallest ones.
constexpr PagedLaunch choose_paged_launch(const PagedStep& p, const Device& device) {
  PagedLaunch best;
  const int dim = static_cast<int>(p.head_dim), group = static_cast<int>(p.heads / p.key_heads);
  const int pass = 4 * paged_lane_rows(static_cast<int>(p.state_dim));
  const auto fits = [&](int heads, int slices) {
    if (group % heads != 0 || dim % slices != 0) return false;
    const int rows = dim * heads / slices;
    return rows % 8 == 0 && (slices == 1 || rows % pass == 0) && rows <= kPagedMaxWarps * pass;
  };
  const auto take = [&](int heads, int slices) {
    best.heads = heads;
    best.slices = slices;
    best.rows = dim * heads / slices;
    best.warps = (best.rows + pass - 1) / pass;
    const int64_t blocks = p.heads / heads * slices * p.sequences;
    return 4 * blocks >= 3 * device.multiprocessors;
  };
  bool enough = false;
  for (int heads = 4; heads >= 1 && !enough; heads /= 2)
    if (fits(heads, 1)) enough = take(heads, 1);
  for (int slices = 2; slices <= 64 && !enough; slices *= 2)
    if (fits(1, slices)) enough = take(1, slices);
  best.group = group;
  best.layout = paged_layout(p, best.heads, best.rows);
  return best;
}

}  // namespace replayssm::cuda
