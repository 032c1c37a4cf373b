// The pairs of a mixture sorted by expert: what the memory of an ExpertPlan holds.
#pragma once

#include <algorithm>

#include "ops/cuda/experts.h"

namespace replayssm::cuda {

// Pairs of one expert that a block takes: places [begin, end) of the sorted ones.
struct alignas(16) ExpertTile {
  int32_t expert, begin, end, unused;
};

// Offsets in bytes. tiles: [1] how many there are.
struct ExpertLayout {
  int64_t pairs = 0;  // at most
  int64_t most_tiles = 0;
  int tile_rows = 0;
  int64_t tiles = 0, tile = 0, pair = 0, total = 0;  // count, [most_tiles], [pairs] in order
};

constexpr ExpertLayout expert_layout(const ExpertShape& shape) {
  ExpertLayout s;
  s.pairs = shape.rows * shape.top_k;
  s.tile_rows = s.pairs < 32 * shape.experts ? 16 : 64;
  s.most_tiles = std::min(s.pairs, s.pairs / s.tile_rows + shape.experts);
  s.tile = 16;
  s.pair = s.tile + s.most_tiles * static_cast<int64_t>(sizeof(ExpertTile));
  s.total = s.pair + (s.pairs * static_cast<int64_t>(sizeof(int32_t)) + 15) / 16 * 16;
  return s;
}

// The plan's memory on the device.
struct ExpertView {
  int32_t* tiles;
  ExpertTile* tile;
  int32_t* pair;
};
inline ExpertView expert_view(const ExpertPlan& plan) {
  const ExpertLayout s = expert_layout(plan.shape);
  auto* base = static_cast<char*>(plan.memory);
  return {reinterpret_cast<int32_t*>(base + s.tiles), reinterpret_cast<ExpertTile*>(base + s.tile),
          reinterpret_cast<int32_t*>(base + s.pair)};
}

// Throws where shape or memory cannot be.
void check_plan(const ExpertPlan& plan);

}  // namespace replayssm::cuda
