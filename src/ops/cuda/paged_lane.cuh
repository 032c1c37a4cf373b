// The rows of a state that a lane holds in the paged decode kernels: eight lanes share a row, as
// RowMap lays it out, and a lane takes kRows consecutive rows of one head.
#pragma once

#include "ops/cuda/paged_block.cuh"

namespace replayssm::cuda {

template <class Act, class State, int kState, bool kSingle>
struct PagedLane {
  using Map = RowMap<State, kState>;
  static constexpr int kPerLane = kState / kRowLanes;
  static constexpr int kRows = paged_lane_rows(kState);
  static constexpr int kRowWords = kPerLane * int(sizeof(State)) / 16;
  using Values = Raw<Act, kRows>;

  int lane, first;      // of the block's rows, the first of this lane's
  bool live;            // there are such rows
  int local_head, row;  // counted from the block's first head; within it
  State* state;         // its first row

  __device__ PagedLane(const PagedStep& p, const PagedLaunch& launch, const PagedBlock& b) {
    lane = threadIdx.x % kRowLanes;
    const int place = (threadIdx.x / 32 * 4 + threadIdx.x % 32 / kRowLanes) * kRows;
    live = place < launch.rows;
    first = live ? place : 0;
    const int dim = static_cast<int>(p.head_dim);
    local_head = first / dim;
    row = b.first_row + first - local_head * dim;
    state = at<State>(p.state, b.row.slot, b.head + local_head, row);
  }

  __device__ void load(const PagedStep& p, uint4 (&words)[kRows * kRowWords]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kRowWords; ++c)
        words[r * kRowWords + c] =
            *reinterpret_cast<const uint4*>(state + r * p.state.stride[2] + Map::element(c, lane));
  }
  __device__ static void unpack(const uint4 (&words)[kRows * kRowWords],
                                float (&s)[kRows][kPerLane]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kRowWords; ++c) {
        const uint4& word = words[r * kRowWords + c];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          widen<State>(reinterpret_cast<const uint32_t*>(&word)[n],
                       s[r] + c * Map::kElems + n * (4 / int(sizeof(State))));
      }
  }
  __device__ void store(const PagedStep& p, const float (&s)[kRows][kPerLane]) const {
    if (!live) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < Map::kChunks; ++c)
        store_elements<State, Map::kElems>(state + r * p.state.stride[2] + Map::element(c, lane),
                                           s[r] + c * Map::kElems);
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
  __device__ void fold(const PagedStep& p, const PagedBlock& b, const float* weights, float decay,
                       float (&s)[kRows][kPerLane]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) s[r][e] *= decay;
    const Act* keys = at<Act>(p.cache_k, b.row.slot, b.key_head);
    const Act* values = cached_values(p, b);
#pragma unroll 2
    for (int j = 0; j < b.row.history; ++j) {
      const int place = b.row.place(j, p.ring, !kSingle);
      float k[kPerLane], v[kRows];
      load_as<Map>(keys + place * p.cache_k.stride[2], lane, k);
      load_elements<Act, kRows>(values + place * p.cache_v.stride[2], v);
      add_row(weights[j], v, k, s);
    }
  }

  // Of the slot's row 0.
  __device__ const Act* cached_values(const PagedStep& p, const PagedBlock& b) const {
    return at<Act>(p.cache_v, b.row.slot, b.head + local_head) + row;
  }
};

}  // namespace replayssm::cuda
