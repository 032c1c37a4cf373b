// What a lane of the paged tile kernel streams: its words of a tile of sixteen state rows and its
// pairs of cached values, by places in shared memory of its own, kPagedDepth tiles ahead.
//
// A tile is the operand a of a product [16, 8] x [8, 8]: lane 4 g + t has rows 2 g and 2 g + 1,
// which stand for rows g and g + 8 of the product, and kRun consecutive columns of every 4 kRun,
// two for each product.
#pragma once

#include "ops/cuda/mma.cuh"
#include "ops/cuda/paged_block.cuh"

namespace replayssm::cuda {

template <class Act, class State, int kTiles, bool kDelta>
class PagedStream {
 public:
  using Pair = Raw<Act, 2>;
  static constexpr int kRun = 16 / int(sizeof(State)), kBlock = 4 * kRun;
  static constexpr int kPairWords = int(sizeof(Pair)) / 4;

  __device__ PagedStream(const PagedStep& p, const PagedLaunch& launch,
                         const PagedTileLayout& layout, const PagedItem& b, char* shared)
      : group(threadIdx.x % 32 / 4),
        quad(threadIdx.x % 4),
        blocks(static_cast<int>(p.state_dim) / kBlock),
        p_(p),
        layout_(layout),
        b_(b),
        rows_(launch.rows),
        count_(b.row.history + (kDelta ? 0 : b.row.window)),
        state_(at<State>(p.state, b.row.slot, b.head, b.first_row) + quad * kRun),
        shared_(shared) {
#pragma unroll
    for (int n = 0; n < kPagedStaged * 2; ++n) cached_[n] = values_of(n * 4 + quad);
  }

  __device__ int tiles() const { return (rows_ + kPagedRows - 1) / kPagedRows; }
  // This lane's first row of a tile, counted from the item's first.
  __device__ int first(int tile) const { return tile * kPagedRows + 2 * group; }
  __device__ bool live(int tile) const { return first(tile) < rows_; }
  // Rows whose values a tile is mixed with: cached ones, Mamba-2's window behind them.
  __device__ int mixed() const { return count_; }

  // Starts the first tiles. Places of rows that there are not hold zeros from here on.
  __device__ void start() {
#pragma unroll
    for (int stage = 0; stage < kPagedDepth; ++stage)
#pragma unroll
      for (int n = 0; n < kPagedStaged * 2; ++n)
        if (!is_row(n * 4 + quad)) *value_place(stage, n) = Pair{};
    for (int tile = 0; tile < kPagedDepth; ++tile) fetch(tile);
  }
  // Tiles come in order; each wait is followed by one fetch, of the tile kPagedDepth behind.
  __device__ void wait() const { copy_async_wait_but<kPagedDepth - 1>(); }
  __device__ void fetch(int tile) {
    if (live(tile)) {
      const int stage = tile % kPagedDepth;
      fetch_state(stage, tile);
#pragma unroll
      for (int n = 0; n < kPagedStaged * 2; ++n)
        if (is_row(n * 4 + quad)) copy_pair(value_place(stage, n), cached_[n] + first(tile));
      if constexpr (kDelta) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          if (n * 4 + quad < b_.row.window)
            copy_pair(fresh_place(stage, n), at<Act>(p_.v, b_.row.token + n * 4 + quad, b_.head) +
                                                 b_.first_row + first(tile));
      }
    }
    copy_async_commit();
  }

  // Columns block * kBlock + quad * kRun on of this lane's two rows.
  __device__ void read(int tile, int block, float (&s)[2][kRun]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      load_elements<State, kRun>(word(tile % kPagedDepth, block, r), s[r]);
  }
  __device__ void store(int tile, int block, const float (&s)[2][kRun]) const {
    if (!live(tile)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) store_elements<State, kRun>(row(tile, r) + block * kBlock, s[r]);
  }
  // The values of rows 8 step + 4 half + quad in this lane's two rows of the tile.
  __device__ Pair values(int tile, int step, int half) const {
    if (step < kPagedStaged) return *value_place(tile % kPagedDepth, step * 2 + half);
    Pair pair;
    const int j = step * 8 + half * 4 + quad;
    if (is_row(j) && live(tile)) pair.load(values_of(j) + first(tile));
    return pair;
  }
  // Those of the window's token 4 n + quad.
  __device__ void fresh(int tile, int n, float (&v)[2]) const {
    fresh_place(tile % kPagedDepth, n)->read(v);
  }

  const int group, quad, blocks;

 private:
  __device__ bool is_row(int j) const { return j < count_; }
  __device__ const Act* values_of(int j) const {
    const int history = b_.row.history;
    if (!is_row(j)) j = 0;
    const Act* head = j < history
                          ? at<Act>(p_.cache_v, b_.row.slot, b_.head,
                                    b_.row.place(j, p_.ring, p_.rule == REPLAYSSM_PAGED_WINDOW))
                          : at<Act>(p_.v, b_.row.token + j - history, b_.head);
    return head + b_.first_row;
  }
  __device__ State* row(int tile, int r) const {
    return state_ + (first(tile) + r) * p_.state.stride[2];
  }
  __device__ char* stage_at(int stage) const { return shared_ + stage * layout_.stage_bytes; }
  __device__ uint4* word(int stage, int block, int r) const {
    return reinterpret_cast<uint4*>(stage_at(stage)) + (block * 2 + r) * 32 + threadIdx.x % 32;
  }
  __device__ Pair* value_place(int stage, int n) const {
    return reinterpret_cast<Pair*>(stage_at(stage) + layout_.values) + n * 32 + threadIdx.x % 32;
  }
  __device__ Pair* fresh_place(int stage, int n) const {
    return reinterpret_cast<Pair*>(stage_at(stage) + layout_.fresh) + n * 32 + threadIdx.x % 32;
  }
  __device__ void fetch_state(int stage, int tile) const {
    const State *upper = row(tile, 0), *lower = row(tile, 1);
#pragma unroll 4
    for (int block = 0; block < blocks; ++block) {
      copy_async_16(word(stage, block, 0), upper + block * kBlock);
      copy_async_16(word(stage, block, 1), lower + block * kBlock);
    }
  }
  __device__ static void copy_pair(Pair* to, const Act* from) {
#pragma unroll
    for (int n = 0; n < kPairWords; ++n)
      copy_async_4(reinterpret_cast<uint32_t*>(to) + n,
                   reinterpret_cast<const uint32_t*>(from) + n);
  }

  const PagedStep& p_;
  const PagedTileLayout& layout_;
  const PagedItem& b_;
  const int rows_, count_;
  State* const state_;
  char* const shared_;
  const Act* cached_[kPagedStaged * 2];
};

}  // namespace replayssm::cuda
