// The arithmetic of one attention tile: some query rows of one key-value head. Behind
// `paged_attention`.
#pragma once

#include <cstdint>

#include "core/buffer.h"
#include "ops/cpu/dense.h"

namespace replayssm::cpu {

// Rows of a tile: (query token, head of the group) pairs, tokens first.
constexpr int64_t kTileRows = 64;
// Keys that meet a tile at once. Chunks start at multiples of this position, so that the order of a
// row's sums depends on its position alone.
constexpr int64_t kTileKeys = 64;

struct AttentionTile {
  const KvCache* cache = nullptr;
  const int32_t* blocks = nullptr;  // of the sequence
  int64_t kv_head = 0;
  int64_t rows = 0;
  int64_t keys = 0;  // that the last row sees
  float scale = 0;
  const float* q[kTileRows] = {};   // [head_dim] of every row
  float* out[kTileRows] = {};       // the same
  int64_t visible[kTileRows] = {};  // keys that a row sees, ascending; of a tree, at most
  // Of a tree: bit i is set where a row sees key window + i. 0: no tree.
  uint64_t ancestors[kTileRows] = {};
  int64_t window = 0;
};

// Scratch memory of a thread.
struct AttentionScratch {
  Array<float> memory;
};

void attend(const AttentionTile& tile, AttentionScratch& scratch);

}  // namespace replayssm::cpu
