// Paged attention: splits a batch into tiles of query rows.
#include <algorithm>
#include <atomic>

#include "core/check.h"
#include "ops/cpu/attention_tile.h"
#include "ops/cpu/dense.h"

namespace replayssm::cpu {
namespace {

int64_t tokens_of(const KvBatch& batch, int64_t sequence) {
  return batch.query_start[sequence + 1] - batch.query_start[sequence];
}

// The tiles of a batch in order: by sequence, then key-value head, then rows.
class Tiles {
 public:
  Tiles(const KvBatch& batch, int64_t kv_heads, int64_t group)
      : batch_(batch), kv_heads_(kv_heads), group_(group) {}

  struct Place {
    int64_t sequence, kv_head, first_row, rows;
  };

  // Moves to tile `index`, not before the last one; false behind the end.
  bool seek(int64_t index, Place& place) {
    for (; sequence_ < batch_.sequences; ++sequence_) {
      const int64_t rows = tokens_of(batch_, sequence_) * group_;
      const int64_t per_head = (rows + kTileRows - 1) / kTileRows;
      if (index < before_ + per_head * kv_heads_) {
        const int64_t tile = (index - before_) % per_head;
        place = {sequence_, (index - before_) / per_head, tile * kTileRows,
                 std::min(kTileRows, rows - tile * kTileRows)};
        return true;
      }
      before_ += per_head * kv_heads_;
    }
    return false;
  }

 private:
  const KvBatch& batch_;
  int64_t kv_heads_;
  int64_t group_;
  int64_t sequence_ = 0;
  int64_t before_ = 0;  // tiles of the sequences before
};

struct Attention {
  const KvCache& cache;
  const KvBatch& batch;
  const float* q;
  int64_t q_stride;
  int64_t heads;
  float scale;
  float* out;

  AttentionTile tile(const Tiles::Place& place) const {
    AttentionTile tile;
    tile.cache = &cache;
    tile.blocks = batch.block_table + place.sequence * batch.block_table_stride;
    tile.kv_head = place.kv_head;
    tile.rows = place.rows;
    tile.scale = scale;
    const int64_t group = heads / cache.kv_heads;
    for (int64_t r = 0; r < place.rows; ++r) {
      const int64_t token = (place.first_row + r) / group;
      const int64_t head = place.kv_head * group + (place.first_row + r) % group;
      const int64_t row = batch.query_start[place.sequence] + token;
      tile.q[r] = q + row * q_stride + head * cache.head_dim;
      tile.out[r] = out + (row * heads + head) * cache.head_dim;
      tile.visible[r] = batch.position[place.sequence] + token + 1;
      if (batch.ancestors) tile.ancestors[r] = batch.ancestors[row];
    }
    tile.keys = tile.visible[place.rows - 1];
    tile.window = batch.position[place.sequence];
    return tile;
  }
};

}  // namespace

void paged_attention(const KvCache& cache, const KvBatch& batch, const float* q, int64_t q_stride,
                     int64_t heads, float scale, float* out, ThreadPool& pool) {
  REPLAYSSM_CHECK(cache.kv_heads > 0 && heads % cache.kv_heads == 0, "heads=", heads,
                  " kv_heads=", cache.kv_heads);
  if (batch.sequences == 0) return;
  const Attention attention{cache, batch, q, q_stride, heads, scale, out};
  // Tiles differ in length: every thread takes the next one. A tile's result does not depend on it.
  std::atomic<int64_t> next = 0;
  pool.run([&](int thread) {
    auto& scratch = pool.local<AttentionScratch>(thread);
    Tiles tiles(batch, cache.kv_heads, heads / cache.kv_heads);
    Tiles::Place place;
    while (tiles.seek(next.fetch_add(1, std::memory_order_relaxed), place))
      attend(attention.tile(place), scratch);
  });
}

}  // namespace replayssm::cpu
