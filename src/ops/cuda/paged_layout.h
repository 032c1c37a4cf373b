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

// Passes over rows of a state that a warp has under way; a window has more to do in each of them.
constexpr int paged_depth(bool single) { return single ? 2 : 1; }

// Tokens of a window whose outputs a lane holds at once.
inline constexpr int kPagedChunk = 4;

// Rows of a state that a lane takes in a pass: 64 numbers.
constexpr int paged_lane_rows(int state_dim) { return 64 / (state_dim / 8); }
constexpr int paged_pass_rows(int state_dim) { return 4 * paged_lane_rows(state_dim); }

// Where tensor cores do it: rows of a pass; most new tokens; cached rows whose
// values are copied with the state; passes under way; bytes of one.
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
  int products = 0;                   // of cached keys
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

// Products of a pair of cached keys that a lane keeps.
constexpr int paged_products(replayssm_family family) { return family == REPLAYSSM_MAMBA2 ? 2 : 4; }
constexpr PagedLayout paged_tile_layout(const PagedStep& p, int state_bytes, int act_bytes) {
  PagedLayout l;
  const int ring = static_cast<int>(p.ring), state_dim = static_cast<int>(p.state_dim);
  l.window = p.rule == REPLAYSSM_PAGED_SINGLE ? 1 : static_cast<int>(p.max_window);
  l.products = paged_tile_depth(state_dim, state_bytes) *
               paged_pass_bytes(state_dim, state_bytes, act_bytes) / 4;
  l.weights = l.products + (ring + 7) / 8 * paged_products(p.family) * 32;
  l.decay = l.weights + ring;
  l.total = (l.decay + 4) / 4 * 4;
  return l;
}

struct PagedLaunch {
  int slices = 1;  // pieces that a head's rows are cut into
  int rows = 0;    // of a piece, the last may have fewer
  int heads = 1;   // of a key head, whose pieces are one warp's; several where there is one slice
  int group = 1;   // heads of a key head
  FastDivide by_slices, by_group;
  PagedLayout layout;

  constexpr int64_t items(const PagedStep& p) const { return p.heads / heads * slices; }
  constexpr int bytes() const { return layout.total * 4; }
};

// Warps that a launch should have, for a multiprocessor: those of rows that flush take longer.
inline constexpr int kPagedItems = 14, kPagedSingleItems = 28;

// Pieces of as many passes as leave so many warps; of two passes, half as many.
constexpr PagedLaunch cut_heads(const PagedStep& p, int pass_rows, int most_rows, int64_t enough) {
  PagedLaunch best;
  const int passes = (static_cast<int>(p.head_dim) + pass_rows - 1) / pass_rows;
  int each = std::min(passes, most_rows / pass_rows);
  const auto slices = [&] { return (passes + each - 1) / each; };
  const auto items = [&] { return p.heads * p.sequences * slices() * (each <= 2 ? 2 : 1); };
  while (each > 1 && items() < enough) each = (each + 1) / 2;
  best.slices = slices();
  best.rows = (passes + best.slices - 1) / best.slices * pass_rows;
  best.group = static_cast<int>(p.heads / p.key_heads);
  best.by_slices = FastDivide(static_cast<uint32_t>(best.slices));
  best.by_group = FastDivide(static_cast<uint32_t>(best.group));
  return best;
}

constexpr PagedLaunch choose_paged_launch(const PagedStep& p, int state_bytes,
                                          const Device& device) {
  const bool single = p.rule == REPLAYSSM_PAGED_SINGLE;
  const int items = single ? kPagedSingleItems : kPagedItems;
  PagedLaunch best = cut_heads(p, paged_pass_rows(static_cast<int>(p.state_dim)), single ? 64 : 128,
                               int64_t{items} * device.multiprocessors);
  best.layout = paged_layout(p, state_bytes);
  return best;
}

// The same on the tensor cores. Where there are many, heads of a key head share its products.
constexpr PagedLaunch choose_paged_tiles(const PagedStep& p, int state_bytes, int act_bytes,
                                         const Device& device) {
  const int64_t enough = int64_t{kPagedItems} * device.multiprocessors;
  PagedLaunch best = cut_heads(p, kPagedTile, static_cast<int>(p.head_dim) + kPagedTile, enough);
  const bool adjoin = p.state.stride[1] == p.head_dim * p.state_dim && p.head_dim % kPagedTile == 0;
  while (best.slices == 1 && adjoin && best.heads < 4 && best.group % (2 * best.heads) == 0 &&
         p.heads * p.sequences >= 8 * best.heads * enough)
    best.heads *= 2;
  best.layout = paged_tile_layout(p, state_bytes, act_bytes);
  return best;
}

}  // namespace replayssm::cuda
