// How a paged decode step is cut into blocks, and what a block keeps in shared memory. Pure
// functions of shapes, shared by host and device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cuda/launch.h"
#include "ops/cuda/step_layout.h"
#include "ops/paged.h"

namespace replayssm::cuda {

// Warps of a block at most; they share the products of one key head.
inline constexpr int kPagedWarps = 4;

// Passes over rows of a state that a warp has under way; a window has more to do in each of them.
constexpr int paged_depth(bool single) { return single ? 2 : 1; }

// Tokens of a window whose outputs a lane holds at once.
inline constexpr int kPagedChunk = 4;

// Rows of a state that a lane takes in a pass: 64 numbers.
constexpr int paged_lane_rows(int state_dim) { return 64 / (state_dim / 8); }
constexpr int paged_pass_rows(int state_dim) { return 4 * paged_lane_rows(state_dim); }

// Rows of a cache whose keys a block may hold for its folds.
inline constexpr int kPagedHeldRows = 32;

// Offsets in floats into a block's shared memory, and into each warp's part of it.
struct PagedLayout {
  int window = 0, padded_window = 0;  // tokens; rounded up
  int queries = 0, keys = 0;          // [window] padded rows: queries; Gated Delta's new keys
  int key_query = 0, key_key = 0;     // [ring + window, padded_window] products of keys with both
  int held = 0;                       // [ring] keys to fold, as cached; 0: there is no room
  int block = 0;                      // all of these
  int stream = 0;                     // words of a state on their way
  int weights = 0;                    // [ring + 1] of cached rows
  int decay = 0;                      // of the state
  int prefix = 0, beta = 0;           // [padded_window]
  int within = 0;                     // [window, padded_window] of rows within the window
  int values = 0;                     // [window, rows] of the window, as they came
  int corrected = 0;                  // [window, 32] Gated Delta's d
  int warp = 0;                       // all of a warp's
};

// state_bytes: of an element; 0 where the kernel streams none.
constexpr PagedLayout paged_layout(const PagedStep& p, int state_bytes, int rows) {
  PagedLayout l;
  int total = 0;
  const auto take = [&](int64_t floats) {
    const int at = total;
    total += static_cast<int>((floats + 3) / 4 * 4);
    return at;
  };
  const int ring = static_cast<int>(p.ring), width = padded_width(static_cast<int>(p.state_dim));
  const bool single = p.rule == REPLAYSSM_PAGED_SINGLE, delta = p.family != REPLAYSSM_MAMBA2;
  l.window = single ? 1 : static_cast<int>(p.max_window);
  l.padded_window = single ? 1 : (l.window + 7) / 8 * 8;
  l.key_query = take((ring + l.window) * l.padded_window);
  if (delta) l.key_key = take((ring + l.window) * l.padded_window);
  if (!single) {
    l.queries = take(l.window * std::max(width, 2));
    if (delta) l.keys = take(l.window * width);
  }
  if (state_bytes > 0 && ring <= kPagedHeldRows)
    l.held = take(ring * p.state_dim * dtype_bytes(DType{p.v.dtype}) / 4);
  l.block = total;
  total = 0;
  l.stream = take(paged_depth(single) * 32 * 64 * state_bytes / 4);
  l.weights = take(ring + 1);
  l.decay = take(1);
  l.prefix = take(l.padded_window);
  if (delta) l.beta = take(l.padded_window);
  if (!single) {
    l.within = take(l.window * l.padded_window);
    if (state_bytes > 0) l.values = take(l.window * rows * dtype_bytes(DType{p.v.dtype}) / 4);
    if (delta && l.window > kPagedChunk) l.corrected = take(l.window * 32);
  }
  l.warp = total;
  return l;
}

struct PagedLaunch {
  int slices = 1;  // pieces that a head's rows are cut into, one for a warp
  int rows = 0;    // of a piece
  int group = 1;   // heads of a key head
  int warps = kPagedWarps;
  PagedLayout layout;

  constexpr int64_t items(const PagedStep& p) const { return p.heads * slices; }
  constexpr int bytes() const { return (layout.block + layout.warp * warps) * 4; }
};

// The largest pieces that still occupy half of the device, else the smallest ones. The pieces of a
// block are of one key head.
constexpr PagedLaunch choose_paged_launch(const PagedStep& p, int state_bytes,
                                          const Device& device) {
  PagedLaunch best;
  const int dim = static_cast<int>(p.head_dim);
  const int pass = paged_pass_rows(static_cast<int>(p.state_dim));
  best.group = static_cast<int>(p.heads / p.key_heads);
  for (int slices = 1; slices <= dim / 8; ++slices) {
    if (dim % slices != 0 || dim / slices % (slices == 1 ? 8 : pass) != 0) continue;
    best.slices = slices;
    best.rows = dim / slices;
    const bool fills = p.heads * slices * p.sequences >= int64_t{6} * device.multiprocessors;
    if (best.rows <= 96 && fills) break;
  }
  while (best.group * best.slices % best.warps != 0) best.warps /= 2;
  best.layout = paged_layout(p, state_bytes, best.rows);
  return best;
}

}  // namespace replayssm::cuda
