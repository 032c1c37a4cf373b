// The rows of a state in the paged decode kernels: eight lanes share a row, as RowMap lays it out,
// and in every pass a lane takes kRows consecutive rows. Each lane streams the words that it will
// use through its own places in shared memory, kDepth passes ahead.
#pragma once

#include "ops/cuda/paged_block.cuh"

namespace replayssm::cuda {

template <class Act, class State, int kState, bool kSingle>
class PagedLane {
 public:
  using Map = RowMap<State, kState>;
  static constexpr int kPerLane = kState / kRowLanes;
  static constexpr int kRows = paged_lane_rows(kState), kPass = paged_pass_rows(kState);
  static constexpr int kRowWords = kPerLane * int(sizeof(State)) / 16;
  static constexpr int kWords = kRows * kRowWords, kDepth = paged_depth(kSingle);
  using Values = Raw<Act, kRows>;

  __device__ PagedLane(const PagedStep& p, const PagedPlace& b, int64_t slot, float* stream)
      : lane(threadIdx.x % kRowLanes),
        place_(threadIdx.x % 32 / kRowLanes * kRows),
        rows_(b.rows),
        stride_(p.state.stride[2]),
        state_(at<State>(p.state, slot, b.head, b.first_row)),
        stream_(reinterpret_cast<uint4*>(stream) + threadIdx.x % 32) {}

  __device__ int passes() const { return (rows_ + kPass - 1) / kPass; }
  // This lane's first row of a pass, counted from the item's first.
  __device__ int first(int pass) const { return pass * kPass + place_; }
  __device__ bool live(int pass) const { return first(pass) < rows_; }

  // Starts the first passes.
  __device__ void start() {
    for (int pass = 0; pass < kDepth; ++pass) fetch(pass);
  }
  // Pass `pass`, in order; starts a later one.
  __device__ void take(int pass, float (&s)[kRows][kPerLane]) {
    copy_async_wait_but<kDepth - 1>();
    const uint4* from = stream_ + pass % kDepth * kWords * 32;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kRowWords; ++c) {
        const uint4 word = from[(r * kRowWords + c) * 32];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          widen<State>(reinterpret_cast<const uint32_t*>(&word)[n],
                       s[r] + c * Map::kElems + n * (4 / int(sizeof(State))));
      }
    fetch(pass + kDepth);
  }
  __device__ void store(int pass, const float (&s)[kRows][kPerLane]) const {
    if (!live(pass)) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < Map::kChunks; ++c)
        store_elements<State, Map::kElems>(
            state_ + (first(pass) + r) * stride_ + Map::element(c, lane), s[r] + c * Map::kElems);
  }

  // s += weight v k.
  __device__ static void add_row(float weight, const float (&v)[kRows], const float (&k)[kPerLane],
                                 float (&s)[kRows][kPerLane]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float write = weight * v[r];
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) s[r][e] = fmaf(write, k[e], s[r][e]);
    }
  }

  // Folds the cached rows.
  __device__ void fold(const PagedStep& p, const PagedItem& b, const float* weights, float decay,
                       int pass, float (&s)[kRows][kPerLane]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) s[r][e] *= decay;
    const Act* keys = at<Act>(p.cache_k, b.row.slot, b.key_head);
    const Act* values = cached_values(p, b, pass);
#pragma unroll 2
    for (int j = 0; j < b.row.history; ++j) {
      const int place = b.row.place(j, p.ring, !kSingle);
      float k[kPerLane], v[kRows];
      load_as<Map>(keys + place * p.cache_k.stride[2], lane, k);
      load_elements<Act, kRows>(values + place * p.cache_v.stride[2], v);
      add_row(weights[j], v, k, s);
    }
  }

  // This lane's rows of a pass in the slot's cached row 0, and in a token; those of the first pass
  // where there are none.
  __device__ const Act* cached_values(const PagedStep& p, const PagedItem& b, int pass) const {
    return at<Act>(p.cache_v, b.row.slot, b.head) + b.first_row + (live(pass) ? first(pass) : 0);
  }
  __device__ const Act* fresh_values(const PagedStep& p, const PagedItem& b, int i,
                                     int pass) const {
    return at<Act>(p.v, b.row.token + i, b.head) + b.first_row + (live(pass) ? first(pass) : 0);
  }

  // The row that this lane finishes, within its head; whether it is the one that does.
  __device__ int owned(const PagedItem& b, int pass) const {
    return b.first_row + (live(pass) ? first(pass) : 0) + owned_row<kRows>(lane);
  }
  __device__ bool owns(int pass) const { return live(pass) && lane % (kRowLanes / kRows) == 0; }

  const int lane;

 private:
  __device__ void fetch(int pass) {
    if (live(pass)) {
      uint4* to = stream_ + pass % kDepth * kWords * 32;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int c = 0; c < kRowWords; ++c)
          copy_async_16(to + (r * kRowWords + c) * 32,
                        state_ + (first(pass) + r) * stride_ + Map::element(c, lane));
    }
    copy_async_commit();
  }

  const int place_, rows_;
  const int64_t stride_;
  State* const state_;
  uint4* const stream_;
};

}  // namespace replayssm::cuda
