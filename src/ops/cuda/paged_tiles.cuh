// States and vectors as operands of the tensor cores, in the paged decode kernel of few tokens.
//
// An instruction multiplies 16 vectors with eight rows, eight columns at a time. Four lanes share a
// vector, and a row: lane l has vectors l / 4 and l / 4 + 8, and row l / 4, all in words of the
// state's type, every fourth from l % 4 on. Its results are rows 2 (l % 4) and the next.
//
// Rows come in passes of 16, two groups of eight, so placed that a lane's results of both are four
// consecutive rows.
#pragma once

#include "ops/cuda/mma.cuh"
#include "ops/cuda/paged_block.cuh"

namespace replayssm::cuda {

// Whether numbers of T have more bits than an operand.
template <class T>
inline constexpr bool kIsWide = std::is_same_v<T, float>;

__device__ inline float first_half(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}

// An operand, as one number or two halves.
template <bool kWide>
struct PagedVectors {
  float4 high, low;
  __device__ explicit PagedVectors(const float4& x) : high(x), low{0, 0, 0, 0} {
    if constexpr (kWide) {
      high = {first_half(x.x), first_half(x.y), first_half(x.z), first_half(x.w)};
      low = {x.x - high.x, x.y - high.y, x.z - high.z, x.w - high.w};
    }
  }
};
template <bool kWide>
struct PagedRows {
  float high[2], low[2] = {0, 0};
  __device__ PagedRows(float x, float y) : high{x, y} {
    if constexpr (kWide) {
      high[0] = first_half(x), high[1] = first_half(y);
      low[0] = x - high[0], low[1] = y - high[1];
    }
  }
};

// Results, those of second halves apart: of vector l / 4 in the first two, of the eighth behind it
// in the others.
struct PagedProducts {
  float high[4] = {0, 0, 0, 0}, low[4] = {0, 0, 0, 0};

  template <bool kWideVectors, bool kWideRows>
  __device__ void add(const PagedVectors<kWideVectors>& a, const PagedRows<kWideRows>& b) {
    multiply_halves_tile(high, a.high, b.high[0], b.high[1]);
    if constexpr (kWideRows) multiply_halves_tile(low, a.high, b.low[0], b.low[1]);
    if constexpr (kWideVectors) multiply_halves_tile(low, a.low, b.high[0], b.high[1]);
  }
  __device__ float sum(int i) const { return high[i] + low[i]; }
};

// How a row of State lies over four lanes.
template <class State, int kState>
struct QuadMap {
  static constexpr int kElems = 16 / int(sizeof(State));  // of a word
  static constexpr int kWords = kState / (4 * kElems);    // of a lane
  __device__ static int element(int word, int quarter) { return (4 * word + quarter) * kElems; }
};

// A lane's share of a vector of T.
template <class T, class Map>
struct QuadVector {
  static constexpr int kElems = Map::kElems, kWords = Map::kWords;
  Raw<T, kElems> words[kWords];

  __device__ void load(const T* from, int quarter) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w].load(from + Map::element(w, quarter));
  }
  // Calls fn(word, its elements).
  template <class Fn>
  __device__ void for_words(Fn&& fn) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float x[kElems];
      words[w].read(x);
      fn(w, x);
    }
  }
  // Becomes `scale` times itself, in T.
  __device__ void multiply(float scale) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float x[kElems];
      words[w].read(x);
#pragma unroll
      for (int e = 0; e < kElems; ++e) x[e] *= scale;
      words[w].write(x);
    }
  }
};

// A warp's rows of a state on their way through shared memory, kDepth passes ahead. Whole rows are
// copied; words of odd rows change places by four, so that lanes that read meet no bank twice.
template <class State, int kState>
class PagedStream {
 public:
  using Map = QuadMap<State, kState>;
  static constexpr int kRowWords = kState / Map::kElems, kPassWords = kPagedTile * kRowWords;
  static constexpr int kDepth = paged_tile_depth(kState, sizeof(State));

  // first: the warp's first row, of `rows`, `stride` elements apart.
  __device__ PagedStream(State* first, int64_t stride, int rows, float* buffer)
      : first_(first), stride_(stride), rows_(rows), buffer_(reinterpret_cast<uint4*>(buffer)) {
    const int lane = threadIdx.x % 32, row = lane / 8 * 4 + lane / 4 % 2;
    even_ = row * kRowWords + row % 2 * 4 + lane % 4;
    odd_ = row * kRowWords - row % 2 * 4 + lane % 4;
  }

  __device__ void start() const {
#pragma unroll
    for (int pass = 0; pass < kDepth; ++pass) fetch(pass);
  }
  // Waits for pass `pass`, the oldest that was not released.
  __device__ void take() const {
    copy_async_wait_but<kDepth - 1>();
    __syncwarp();
  }
  // Gives the pass's room to a later one.
  __device__ void release(int pass) const {
    __syncwarp();
    fetch(pass + kDepth);
  }
  // Of this lane's row of a group of eight.
  __device__ uint4& word(int pass, int group, int w) const {
    return buffer_[pass % kDepth * kPassWords + (w % 2 == 0 ? even_ : odd_) +
                   group * 2 * kRowWords + 4 * w];
  }
  // Stores the pass's rows as they are in shared memory.
  __device__ void store(int pass) const {
    __syncwarp();
    for_copies(pass,
               [](uint4* shared, State* global) { *reinterpret_cast<uint4*>(global) = *shared; });
  }

 private:
  __device__ void fetch(int pass) const {
    for_copies(pass, [](uint4* shared, State* global) { copy_async_16(shared, global); });
    copy_async_commit();
  }
  // Calls fn with both places of the words that this lane copies.
  template <class Fn>
  __device__ void for_copies(int pass, Fn&& fn) const {
    const int left = rows_ - pass * kPagedTile, lane = threadIdx.x % 32;
    if (left <= 0) return;
    uint4* const to = buffer_ + pass % kDepth * kPassWords;
    State* const from = first_ + int64_t{pass} * kPagedTile * stride_;
#pragma unroll
    for (int i = 0; i < kPassWords / 32; ++i) {
      const int row = (i * 32 + lane) / kRowWords, word = (i * 32 + lane) % kRowWords;
      if (row < left)
        fn(to + row * kRowWords + (word ^ row % 2 * 4), from + row * stride_ + word * Map::kElems);
    }
  }

  State* const first_;
  const int64_t stride_;
  const int rows_;
  uint4* const buffer_;
  int even_, odd_;  // where this lane's words of even and odd numbers begin
};

}  // namespace replayssm::cuda
