// How attention is cut into pieces of work. Pure functions, shared by host and device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cuda/attention.h"

namespace replayssm::cuda {

// A tile of one sequence's queries and one of the ranges of its keys. A block takes it for one head
// of keys.
struct alignas(16) AttentionItem {
  int32_t sequence, split, splits;
  int32_t first_token;         // of the sequence in the batch
  int32_t position;            // its tokens before the window
  int32_t first_row, rows;     // of the window's [tokens, group]; rows that exist
  int32_t key_begin, key_end;  // keys that the block goes through
  int32_t unused[3];
};

// What plan_attention leaves: the count in front, then the items.
struct alignas(16) AttentionPlan {
  int32_t count;
};

// Rows of a tile: tokens times the heads that share a key, a token's side by side.
inline constexpr int kSmallTile = 16;
constexpr int large_tile(int64_t head_dim) { return head_dim <= 256 ? 64 : 32; }
// Keys of a range, at least; ranges of a sequence, at most.
inline constexpr int kLeastKeys = 64, kMostSplits = 64;

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
  const int64_t splits = std::min<int64_t>({std::max<int64_t>(wanted, 4), kMostSplits, useful});
  cut.splits = static_cast<int>(std::max<int64_t>(splits, 1));
  cut.items = shape.sequences * cut.splits;
  return cut;
}

// The longest window whose sequences' keys are cut into ranges: with it such a pass needs most.
constexpr int64_t longest_cut_window(int64_t group, int64_t head_dim) {
  return std::max<int64_t>(large_tile(head_dim) / group, 1);
}

// How the keys of a sequence with a single tile are cut.
struct KeyRanges {
  int keys, splits;  // of each; how many
};
constexpr KeyRanges key_ranges(int keys, int most_splits) {
  if (most_splits == 1) return {keys, 1};
  const int even = (keys + most_splits - 1) / most_splits, rounded = (even + 63) / 64 * 64;
  const int range = rounded > kLeastKeys ? rounded : kLeastKeys;
  return {range, (keys + range - 1) / range};
}

}  // namespace replayssm::cuda
