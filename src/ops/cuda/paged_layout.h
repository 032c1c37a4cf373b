// How a paged decode step is cut into blocks, and what it keeps in shared memory. Pure functions of
// shapes, shared by host and device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cuda/launch.h"
#include "ops/cuda/padded_rows.h"
#include "ops/paged.h"

namespace replayssm::cuda {

// Warps of a block; they share nothing.
inline constexpr int kPagedWarps = 4;

// Rows of a state that a warp takes at a time, and such tiles under way.
inline constexpr int kPagedRows = 16, kPagedDepth = 2;

// Groups of eight cached rows whose values come along with a tile.
inline constexpr int kPagedStaged = 4;

// Tokens of a window whose outputs a lane of the general kernel holds at once.
inline constexpr int kPagedChunk = 4;

struct PagedLaunch {
  int slices = 1;  // pieces that a head's rows are cut into, one for a warp
  int rows = 0;    // of a piece
  int group = 1;   // heads of a key head
  int window = 1;  // most tokens
  int warps = kPagedWarps;

  constexpr int64_t items(const PagedStep& p) const { return p.heads * slices; }
};

constexpr int paged_window_of(const PagedStep& p) {
  return p.rule == REPLAYSSM_PAGED_SINGLE ? 1 : static_cast<int>(p.max_window);
}

// The largest pieces that still occupy half of the device, else the smallest ones.
constexpr PagedLaunch choose_paged_launch(const PagedStep& p, const Device& device) {
  PagedLaunch best;
  const int dim = static_cast<int>(p.head_dim);
  const int64_t enough = int64_t{6} * device.multiprocessors;
  for (int slices = 1; slices <= dim; ++slices) {
    if (dim % slices != 0 || (slices > 1 && dim / slices % kPagedRows != 0)) continue;
    best.slices = slices;
    best.rows = dim / slices;
    if (best.rows <= 128 && p.heads * slices * p.sequences >= enough) break;
  }
  const int64_t items = p.heads * best.slices * p.sequences;
  while (best.warps > 1 && items < best.warps * int64_t{device.multiprocessors}) best.warps /= 2;
  best.group = static_cast<int>(p.heads / p.key_heads);
  best.window = paged_window_of(p);
  return best;
}

// Offsets into shared memory, one behind the other.
struct PagedOffsets {
  int total = 0;

  constexpr int take(int64_t bytes) {
    const int at = total;
    total += static_cast<int>((bytes + 15) / 16 * 16);
    return at;
  }
  constexpr int take_floats(int64_t floats) { return take(floats * 4) / 4; }
};

// What a warp of the tile kernel keeps: bytes for what has a type of its own, else floats.
struct PagedTileLayout {
  int stage_bytes = 0;    // of a tile under way: words of the state, then
  int values = 0;         // pairs of cached values, from a stage's start
  int fresh = 0;          // pairs of the window's values, Gated Delta
  int vectors = 0;        // [columns] queries; Gated Delta: and keys, token by token
  int vector_bytes = 0;   // from one to the next
  int factors = 0;        // [rows, columns] what cached values are multiplied with
  int factor_stride = 0;  // from row to row
  int weights = 0;        // [ring + 1] of cached rows
  int decay = 0;          // of the state
  int prefix = 0;         // [tokens] decay up to and with a token of the window
  int within = 0;         // [tokens, tokens] weights of the window's rows in its tokens
  int beta = 0, query_scale = 0, key_scale = 0;  // [tokens] Gated Delta
  int coefficients = 0;                          // [tokens, tokens] pairs, Gated Delta
  int total = 0;                                 // bytes
};

// Tokens that eight columns of a product stand for.
constexpr int paged_column_tokens(bool delta) { return delta ? 4 : 8; }

// tiles: eights of columns.
constexpr PagedTileLayout paged_tile_layout(const PagedStep& p, int state_bytes, int act_bytes,
                                            int tiles) {
  PagedTileLayout l;
  const bool delta = p.family != REPLAYSSM_MAMBA2;
  const int tokens = tiles * paged_column_tokens(delta);
  const auto state_dim = static_cast<int>(p.state_dim), ring = static_cast<int>(p.ring);
  PagedOffsets stage;
  stage.take(int64_t{kPagedRows} * state_dim * state_bytes);
  l.values = stage.take(kPagedStaged * 2 * 32 * 2 * act_bytes);
  if (delta) l.fresh = stage.take(tiles * 32 * 2 * act_bytes);
  l.stage_bytes = stage.total;
  PagedOffsets all;
  all.take(kPagedDepth * l.stage_bytes);
  l.vector_bytes = state_dim * act_bytes + 32;  // lanes of one read meet no bank twice
  l.vectors = all.take(8 * tiles * l.vector_bytes);
  l.factor_stride = 8 * (tiles | 1);
  l.factors = all.take_floats(round_up(ring + tokens, 16) * l.factor_stride);
  l.weights = all.take_floats(ring + 1);
  l.decay = all.take_floats(1);
  l.prefix = all.take_floats(tokens);
  l.within = all.take_floats(tokens * tokens);
  if (delta) {
    l.beta = all.take_floats(tokens);
    l.query_scale = all.take_floats(tokens);
    l.key_scale = all.take_floats(tokens);
    l.coefficients = all.take_floats(tokens * tokens * 2);
  }
  l.total = all.total;
  return l;
}

// What a block of the general kernel keeps, in floats.
struct PagedLayout {
  int window = 0, padded_window = 0;  // tokens; rounded up
  int scales = 0;                     // [2, window] of queries and keys
  int key_query = 0, key_key = 0;     // [ring + window, padded_window] products of keys with both
  int weights = 0;                    // [ring + 1] of cached rows
  int decay = 0;                      // of the state
  int prefix = 0, beta = 0;           // [padded_window]
  int within = 0;                     // [window, padded_window] of rows within the window
  int bytes = 0;
};

constexpr PagedLayout paged_layout(const PagedStep& p) {
  PagedLayout l;
  PagedOffsets all;
  const bool delta = p.family != REPLAYSSM_MAMBA2;
  l.window = paged_window_of(p);
  l.padded_window = round_up(l.window, 8);
  const int64_t products = (p.ring + l.window) * l.padded_window;
  l.scales = all.take_floats(2 * l.window);
  l.key_query = all.take_floats(products);
  if (delta) l.key_key = all.take_floats(products);
  l.weights = all.take_floats(p.ring + 1);
  l.decay = all.take_floats(1);
  l.prefix = all.take_floats(l.padded_window);
  if (delta) l.beta = all.take_floats(l.padded_window);
  l.within = all.take_floats(l.window * l.padded_window);
  l.bytes = all.total;
  return l;
}

}  // namespace replayssm::cuda
