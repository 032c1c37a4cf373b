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
  __device__ void store(T* to, int quarter) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      *reinterpret_cast<typename Raw<T, kElems>::W*>(to + Map::element(w, quarter)) = words[w].word;
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

// This lane's token's query and new key.
template <class Act, class Map>
struct PagedFresh {
  QuadVector<Act, Map> query{}, key{};

  __device__ PagedFresh(const PagedStep& p, int key_head, int token, int window) {
    const int lane = threadIdx.x % 32, own = lane / 4;
    if (own >= window) return;
    query.load(at<Act>(p.q, token + own, key_head), lane % 4);
    key.load(at<Act>(p.k, token + own, key_head), lane % 4);
  }
};

// A warp's rows on their way through shared memory, kDepth passes ahead: of the state, of the
// first cached values and of the new tokens' values. Whole rows of states are copied; words of odd
// rows change places by four, so that lanes that read meet no bank twice.
template <class Act, class State, int kState>
class PagedStream {
 public:
  using Map = QuadMap<State, kState>;
  static constexpr int kRowWords = kState / Map::kElems, kStateWords = kPagedTile * kRowWords;
  static constexpr int kChunks = kPagedTile * int(sizeof(Act)) / 16;  // words of a row of values
  static constexpr int kValueRows = kPagedStaged + kPagedTokens;
  static constexpr int kPassWords = kStateWords + kValueRows * (kChunks + 1);
  static constexpr int kDepth = paged_tile_depth(kState, sizeof(State));
  static_assert(kPassWords * 16 == paged_pass_bytes(kState, sizeof(State), sizeof(Act)));

  // Passes go on from head to head; several have whole passes each.
  __device__ PagedStream(const PagedStep& p, const PagedPlace& b, int heads, int64_t slot,
                         float* buffer)
      : lane_(threadIdx.x % 32),
        state_(at<State>(p.state, slot, b.head, b.first_row) + lane_ * Map::kElems),
        head_rows_(b.rows),
        rows_(b.rows * heads),
        buffer_(reinterpret_cast<uint4*>(buffer)) {}

  // Starts the first passes' copies of the state; of values, once it is known where they are.
  __device__ void start_states() const {
#pragma unroll
    for (int pass = 0; pass < kDepth; ++pass) {
      fetch_states(pass);
      copy_async_commit();
    }
  }
  __device__ void start_values(const PagedStep& p, const PagedItem& b, bool wraps) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = copied(i) / kChunks, token = row - kPagedStaged;
      values_[i] = nullptr;
      strides_[i] = token < 0 ? p.cache_v.stride[1] : p.v.stride[1];
      if (token < 0) {
        if (row < b.row.history)
          values_[i] = at<Act>(p.cache_v, b.row.slot, b.head, b.row.place(row, p.ring, wraps));
      } else if (token < b.row.window) {
        values_[i] = at<Act>(p.v, b.row.token + token, b.head);
      }
      if (values_[i] != nullptr) values_[i] += b.first_row + copied(i) % kChunks * kChunk;
    }
#pragma unroll
    for (int pass = 0; pass < kDepth; ++pass) fetch_values(pass);
    copy_async_commit();
  }
  // Waits for pass `pass`, the oldest that was not released.
  __device__ void take(int pass) const {
    if (pass == 0) {
      copy_async_wait_all();
    } else {
      copy_async_wait_but<kDepth - 1>();
    }
    __syncwarp();
  }
  // Gives the pass's room to a later one.
  __device__ void release(int pass) {
    __syncwarp();
    fetch_states(pass + kDepth);
    fetch_values(pass + kDepth);
    copy_async_commit();
  }

  // Of this lane's row of a group of eight.
  __device__ uint4& word(int pass, int group, int w) const {
    const int row = lane_ / 8 * 4 + lane_ / 4 % 2, swap = w % 2 == 0 ? row % 2 : -(row % 2);
    return room(pass)[row * kRowWords + lane_ % 4 + 4 * swap + group * 2 * kRowWords + 4 * w];
  }
  // The values of four rows of the pass from 4 `four` on, of a cached row; of a new token.
  __device__ const Act* cached(int pass, int j, int four) const {
    return reinterpret_cast<const Act*>(room(pass) + kStateWords + j * (kChunks + 1)) + 4 * four;
  }
  __device__ const Act* fresh(int pass, int token, int four) const {
    return cached(pass, kPagedStaged + token, four);
  }
  // Stores the pass's rows of the state as they are in shared memory.
  __device__ void store(int pass) const {
    __syncwarp();
    for_states(pass,
               [](uint4* shared, State* global) { *reinterpret_cast<uint4*>(global) = *shared; });
  }

 private:
  static constexpr int kChunk = 16 / int(sizeof(Act));
  static constexpr int kCopies = (kValueRows * kChunks + 31) / 32;
  // The chunk that this lane copies, of all rows of values.
  __device__ static int copied(int i) { return i * 32 + static_cast<int>(threadIdx.x % 32); }
  __device__ uint4* room(int pass) const { return buffer_ + pass % kDepth * kPassWords; }

  __device__ void fetch_states(int pass) const {
    for_states(pass, [](uint4* shared, State* global) { copy_async_16(shared, global); });
  }
  __device__ void fetch_values(int pass) {
    const int left = rows_ - pass * kPagedTile;
    if (left <= 0) return;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int n = copied(i), row = n / kChunks, chunk = n % kChunks;
      if (n >= kValueRows * kChunks || chunk * kChunk >= left) continue;
      const bool valid = values_[i] != nullptr;
      copy_async_16_or_zero(room(pass) + kStateWords + row * (kChunks + 1) + chunk,
                            valid ? values_[i] + fetched_ * kPagedTile : any(), valid);
    }
    if (++fetched_ * kPagedTile < head_rows_) return;
    fetched_ = 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      if (values_[i] != nullptr) values_[i] += strides_[i];
  }
  __device__ const void* any() const { return state_; }
  // Calls fn with both places of the words of states that this lane copies.
  template <class Fn>
  __device__ void for_states(int pass, Fn&& fn) const {
    const int left = rows_ - pass * kPagedTile;
    if (left <= 0) return;
    State* const from = state_ + pass * (kPagedTile * kState);
    for_half(room(pass), from, fn);
    if (left > 8) for_half(room(pass) + kStateWords / 2, from + 8 * kState, fn);
  }
  template <class Fn>
  __device__ void for_half(uint4* to, State* from, Fn&& fn) const {
#pragma unroll
    for (int i = 0; i < kStateWords / 64; ++i) {
      const int row = i * 32 / kRowWords + (kRowWords < 32 ? lane_ / kRowWords : 0);
      fn(to + i * 32 + (lane_ ^ row % 2 * 4), from + i * 32 * Map::kElems);
    }
  }

  const int lane_;
  State* const state_;          // this lane's first word
  const int head_rows_, rows_;  // of a head, in all
  uint4* const buffer_;
  const Act* values_[kCopies];  // what this lane copies of the first pass's values, of a head
  int64_t strides_[kCopies];    // from head to head
  int fetched_ = 0;             // passes of that head
};

}  // namespace replayssm::cuda
