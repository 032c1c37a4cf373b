// How a paged decode step is cut into blocks, and what a block keeps in shared memory. Pure
// functions of shapes, shared by host and device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cuda/fast_divide.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/padded_rows.h"
#include "ops/paged.h"

namespace replayssm::cuda {

// Warps of a block; they share nothing.
inline constexpr int kPagedWarps = 4;

// Passes over rows of a state that a warp has under way; a window has more to do in each of them.
constexpr int paged_depth(bool single) { return single ? 2 : 1; }

// Tokens of a window whose outputs a lane holds at once.
inline constexpr int kPagedChunk = 4;

// Rows of a state that a lane takes in a pass: 64 numbers.
constexpr int paged_lane_rows(int state_dim) { return 64 / (state_dim / 8); }
constexpr int paged_pass_rows(int state_dim) { return 4 * paged_lane_rows(state_dim); }

// Where tensor cores do it: warps of a block; rows of a pass; most new tokens; cached rows whose
// values are copied with the state; passes under way; bytes of one.
inline constexpr int kPagedTokenWarps = 2;
inline constexpr int kPagedTile = 16, kPagedTokens = 8, kPagedStaged = 16;
constexpr int paged_tile_depth(int state_dim, int state_bytes) {
  return std::max(2, 16384 / (kPagedTile * state_dim * state_bytes));
}
constexpr int paged_pass_bytes(int state_dim, int state_bytes, int act_bytes) {
  return kPagedTile * state_dim * state_bytes +
         (kPagedStaged + kPagedTokens) * (kPagedTile * act_bytes + 16);
}

// Offsets in floats into a warp's shared memory.
struct PagedLayout {
  int window = 0, padded_window = 0;  // tokens; rounded up
  int stream = 0;                     // words of a state on their way
  int queries = 0, keys = 0;          // [window] padded rows: queries; Gated Delta's new keys.
                                      // paged_any.cu: their scales
  int key_query = 0, key_key = 0;     // [ring + window, padded_window] products of keys with both
  int weights = 0;                    // [ring + 1] of cached rows
  int decay = 0;                      // of the state
  int prefix = 0, beta = 0;           // [padded_window]
  int within = 0;                     // [window, padded_window] of rows within the window
  int corrected = 0;                  // [window, rows of a pass] Gated Delta's d
  int mixing = 0;                     // factors of cached values, a lane's four of eight rows
  int total = 0;
};

// state_bytes: of an element; 0 for paged_any.cu, which streams none.
constexpr PagedLayout paged_layout(const PagedStep& p, int state_bytes) {
  PagedLayout l;
  const auto take = [&](int64_t floats) {
    const int at = l.total;
    l.total += static_cast<int>((floats + 3) / 4 * 4);
    return at;
  };
  const int ring = static_cast<int>(p.ring), state_dim = static_cast<int>(p.state_dim);
  const int width = padded_width(state_dim);
  const bool single = p.rule == REPLAYSSM_PAGED_SINGLE, delta = p.family != REPLAYSSM_MAMBA2;
  l.window = single ? 1 : static_cast<int>(p.max_window);
  l.padded_window = single ? 1 : (l.window + 7) / 8 * 8;
  l.stream = take(paged_depth(single) * 32 * 64 * state_bytes / 4);
  if (state_bytes == 0) {
    l.queries = take(l.window);
    l.keys = take(l.window);
  } else if (!single) {
    l.queries = take(l.window * width);
    if (delta) l.keys = take(l.window * width);
  }
  l.key_query = take((ring + l.window) * l.padded_window);
  if (delta) l.key_key = take((ring + l.window) * l.padded_window);
  l.weights = take(ring + 1);
  l.decay = take(1);
  l.prefix = take(l.padded_window);
  if (delta) l.beta = take(l.padded_window);
  if (!single) {
    l.within = take(l.window * l.padded_window);
    if (delta && l.window > kPagedChunk) l.corrected = take(l.window * 32);
  }
  return l;
}

constexpr PagedLayout paged_tile_layout(const PagedStep& p, int state_bytes, int act_bytes) {
  PagedLayout l;
  const int ring = static_cast<int>(p.ring), state_dim = static_cast<int>(p.state_dim);
  l.window = p.rule == REPLAYSSM_PAGED_SINGLE ? 1 : static_cast<int>(p.max_window);
  l.mixing = paged_tile_depth(state_dim, state_bytes) *
             paged_pass_bytes(state_dim, state_bytes, act_bytes) / 4;
  l.weights = l.mixing + (ring + 7) / 8 * (4 * 32);
  l.decay = l.weights + ring;
  l.total = (l.decay + 4) / 4 * 4;
  return l;
}

struct PagedLaunch {
  int slices = 1;  // pieces that a head's rows are cut into, one for a warp
  int rows = 0;    // of a piece
  int group = 1;   // heads of a key head
  int warps = kPagedWarps;
  FastDivide by_slices, by_group;
  PagedLayout layout;

  constexpr int64_t items(const PagedStep& p) const { return p.heads * slices; }
  constexpr int bytes() const { return layout.total * warps * 4; }
};

// The largest pieces that still occupy half of the device, else the smallest ones.
constexpr PagedLaunch choose_paged_launch(const PagedStep& p, int state_bytes,
                                          const Device& device) {
  PagedLaunch best;
  const int dim = static_cast<int>(p.head_dim);
  const int pass = paged_pass_rows(static_cast<int>(p.state_dim));
  const int most = p.rule == REPLAYSSM_PAGED_SINGLE ? 96 : 128;
  const int64_t enough = int64_t{6} * device.multiprocessors;
  for (int slices = 1; slices <= 64; slices *= 2) {
    if (dim % slices != 0 || dim / slices % 8 != 0) break;
    if (slices > 1 && dim / slices % pass != 0) break;
    best.slices = slices;
    best.rows = dim / slices;
    if (best.rows <= most && p.heads * slices * p.sequences >= enough) break;
  }
  const int64_t items = p.heads * best.slices * p.sequences;
  while (best.warps > 1 && items < best.warps * int64_t{device.multiprocessors}) best.warps /= 2;
  best.group = static_cast<int>(p.heads / p.key_heads);
  best.layout = paged_layout(p, state_bytes);
  return best;
}

// As many passes for a warp as leave enough warps.
constexpr PagedLaunch choose_paged_tiles(const PagedStep& p, int state_bytes, int act_bytes,
                                         const Device& device) {
  PagedLaunch best;
  const int dim = static_cast<int>(p.head_dim), passes = (dim + kPagedTile - 1) / kPagedTile;
  const int64_t heads = p.heads * p.sequences, enough = int64_t{7} * device.multiprocessors;
  int each = passes;
  const auto slices = [&] { return (passes + each - 1) / each; };
  while (each > 1 && heads * slices() < enough) each = (each + 1) / 2;
  best.slices = slices();
  best.rows = each * kPagedTile;
  best.warps = kPagedTokenWarps;
  const int64_t items = heads * best.slices;
  while (best.warps > 1 && items < best.warps * int64_t{device.multiprocessors}) best.warps /= 2;
  best.group = static_cast<int>(p.heads / p.key_heads);
  best.layout = paged_tile_layout(p, state_bytes, act_bytes);
  return best;
}

}  // namespace replayssm::cuda
