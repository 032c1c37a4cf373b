// How attention is cut into pieces of work. Pure functions, shared by host and device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cuda/attention.h"

namespace replayssm::cuda {

// A tile of one sequence's queries and one of the ranges of its keys. A block takes it for one head
// of keys.
struct alignas(16) AttentionItem {
  int32_t sequence, tile, split, splits;
  int32_t first_token, window;  // of the sequence in the batch
  int32_t position;             // its tokens before the window
  int32_t unused;
};

// What plan_attention leaves: the count in front, then the items.
struct alignas(16) AttentionPlan {
  int32_t count;
};

// Rows of a tile: tokens times the heads that share a key, a token's side by side.
inline constexpr int kSmallTile = 16;
constexpr int large_tile(int64_t head_dim) { return head_dim <= 256 ? 64 : 32; }
// Keys of a range, at least; ranges of a sequence, at most, and those for each row of a tile.
inline constexpr int kLeastKeys = 64, kMostSplits = 64, kMostParts = 1024;

struct AttentionCut {
  int group = 1;          // heads that share a key
  int rows = kSmallTile;  // of a tile
  int splits = 1;         // at most; one where a sequence may have several tiles
  int64_t items = 0;      // at most
};

constexpr AttentionCut attention_cut(const AttentionShape& shape) {
  AttentionCut cut;
  const int64_t group = shape.heads / shape.kv_heads, rows = shape.max_window * group;
  const int large = large_tile(shape.head_dim);
  cut.group = static_cast<int>(group);
  cut.rows = rows <= kSmallTile ? kSmallTile : large;
  if (rows > large) {
    cut.items = shape.tokens * group / large + shape.sequences;
    return cut;
  }
  // Enough pieces to fill a device, and four to even out long and short sequences.
  const int64_t blocks = shape.sequences * shape.kv_heads, wanted = blocks > 0 ? 1024 / blocks : 1,
                useful = (shape.max_context + kLeastKeys - 1) / kLeastKeys;
  const int64_t splits =
      std::min<int64_t>({std::max<int64_t>(wanted, 4), kMostSplits, kMostParts / cut.rows, useful});
  cut.splits = static_cast<int>(std::max<int64_t>(splits, 1));
  cut.items = shape.sequences * cut.splits;
  return cut;
}

// Keys of a range of a sequence that has so many.
constexpr int64_t keys_per_split(int64_t keys, int most_splits) {
  const int64_t even = (keys + most_splits - 1) / most_splits;
  return std::max<int64_t>((even + 63) / 64 * 64, kLeastKeys);
}

}  // namespace replayssm::cuda
