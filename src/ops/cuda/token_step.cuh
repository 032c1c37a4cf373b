// Decode steps and folds of any shape: head_dim and state_dim, alignment, windows, read copies of
// every type, stochastic rounding. The recurrence runs over ring and window with the state in
// registers, on every route, as the conventional one has it; what a route stores is all that
// differs.
//
// Grid: (heads and slices of their rows, sequences). Of a tree's tokens each one starts from the
// state behind the ring and takes its ancestors. Nothing of a ring is read that another block
// writes: windows are appended behind it.
#pragma once

#include "core/philox.h"
#include "ops/cuda/token_rows.cuh"
#include "ops/cuda/token_source.cuh"

namespace replayssm::cuda {

// `x` between two numbers of 16 bits: away from zero where its 16 random bits carry.
__device__ inline Bf16 round_stochastic(float x, uint32_t random, Bf16) {
  const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = magnitude > 0x7f800000u ? bits | 0x400000u : bits + random;
  return __ushort_as_bfloat16(static_cast<unsigned short>(rounded >> 16));
}
__device__ inline Fp16 round_stochastic(float x, uint32_t random, Fp16) {
  const float size = fabsf(x);
  const uint32_t bits = __float_as_uint(size), sign = __float_as_uint(x) >> 31 << 15;
  uint32_t code;
  if (bits > 0x7f800000u) {
    code = 0x7e00u;
  } else if (bits < 0x38800000u) {  // a subnormal: units of 2^-40
    code = (static_cast<uint32_t>(size * 0x1p40f) + random) >> 16;
  } else {
    code = min((bits + (random >> 3) - (112u << 23)) >> 13, 0x7c00u);
  }
  return __ushort_as_half(static_cast<unsigned short>(sign | code));
}

template <Family kFamily, class State, int kState, bool kWhole>
class TokenStep : TokenRows<kFamily, State, kState, kWhole, RingTokens> {
  using Rows = TokenRows<kFamily, State, kState, kWhole, RingTokens>;

 public:
  using Rows::kChannels, Rows::kLaneRows, Rows::kColumns, Rows::kFetchedFloats, Rows::kWarpRows;
  using Rows::Rows;
  using typename Rows::Map;
  static constexpr bool kFetches = false;  // a block makes one pass

  // After the kernel before.
  __device__ void run() {
    if (slot_ < 0) return clear();
    if (window_ == 0 && !launch_.folds_all) return;
    target_ = launch_.target_slot ? launch_.target_slot[blockIdx.y] : slot_;
    if (target_ < 0) return;
    if (launch_.folds_all && tokens_.history == 0) return copy_slot();
    load_state();
    if (p_.batch.parent) {
      take(0, tokens_.history);
      take_tree();
    } else {
      take(0, tokens_.history + window_);
    }
    if (window_ > 0 && p_.route != Route::kConventional) append();
  }

 private:
  using Rows::block_row_, Rows::group_, Rows::head_, Rows::lane_, Rows::launch_, Rows::layout_;
  using Rows::has, Rows::row, Rows::s_, Rows::kPerLane, Rows::first_row;
  using Rows::p_, Rows::slot_, Rows::tokens_, Rows::window_, Rows::clear;

  // The first tokens: their effect goes into the checkpoint.
  __device__ int stored() const {
    if (launch_.folds_all) return tokens_.history;
    return p_.route == Route::kConventional ? tokens_.history + window_ : tokens_.folded;
  }

  __device__ void load_state() {
    const ReadCopy& copy = p_.state.read_copy;
    const bool reads_copy = copy.data && stored() == 0 && !launch_.folds_all;
    if (!reads_copy) {
      if constexpr (kWhole) this->fetch(this->checkpoint());
      this->pass_ = 0;
      return this->load(this->checkpoint());
    }
    switch (copy.dtype) {
      case DType::kFloat32: return load_copy<float>(copy);
      case DType::kFloat16: return load_copy<Fp16>(copy);
      case DType::kBFloat16: return load_copy<Bf16>(copy);
      case DType::kFloat8E4M3: return load_copy<Fp8>(copy);
      case DType::kInt8: return load_copy<Int8>(copy);
    }
  }
  template <class T>
  __device__ void load_copy(const ReadCopy& copy) {
    const int64_t first = slot_ * int64_t{launch_.heads} * launch_.head_dim + first_row();
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const int64_t at = first + row(r);
      const float scale = has(r) && kIs8Bit<T> ? copy.scale[at] : 1.0f;
      const T* line = static_cast<const T*>(copy.data) + at * launch_.state_dim;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) {
        const int column = Map::element(e / Map::kElems, lane_) + e % Map::kElems;
        s_[r][e] = has(r) && column < launch_.state_dim ? scale * value_of(line[column]) : 0.0f;
      }
    }
  }
  template <class T>
  __device__ static float value_of(T x) {
    if constexpr (std::is_same_v<T, Int8> || std::is_same_v<T, Fp8>) {
      return static_cast<float>(x);
    } else {
      return to_float(x);
    }
  }

  // Nothing to fold: another slot gets what this one has, bit for bit.
  __device__ void copy_slot() const {
    if (target_ == slot_) return;
    const ReadCopy& read = p_.state.read_copy;
    copy_rows(p_.state.checkpoint, int64_t{launch_.state_dim} * int(sizeof(State)));
    if (read.data == nullptr) return;
    copy_rows(read.data, launch_.state_dim * dtype_bytes(read.dtype));
    if (dtype_bytes(read.dtype) == 1) copy_rows(read.scale, sizeof(float));
  }
  __device__ void copy_rows(void* data, int64_t row_bytes) const {
    const int64_t slot_rows = int64_t{launch_.heads} * launch_.head_dim;
    const int64_t count = min(layout_.rows, launch_.head_dim - block_row_) * row_bytes;
    const auto at = [&](int slot) {
      return static_cast<char*>(data) + (slot * slot_rows + first_row()) * row_bytes;
    };
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) at(target_)[i] = at(slot_)[i];
  }

  // Tokens [begin, end), one after the other.
  __device__ void take(int begin, int end) {
    const int stored = this->stored();
#pragma unroll 1
    for (int first = begin; first < end; first += layout_.chunk) {
      const int count = min(layout_.chunk, end - first);
      stage(first, count);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        this->update(i);
        if (first + i + 1 == stored) keep();
        if (tokens_.is_new(first + i)) this->output(first + i - tokens_.history, i);
      }
    }
  }
  __device__ void stage(int first, int count) {
    __syncthreads();
    Rows::stage(first, count);
    __syncthreads();
  }
  __device__ void take_tree() {
    float ring[kLaneRows][kPerLane];
    assign(s_, ring);
#pragma unroll 1
    for (int i = 0; i < window_; ++i) {
      assign(ring, s_);
#pragma unroll 1
      for (int node = root_of(i);; node = child_of(node, i)) {
        stage(tokens_.history + node, 1);
        this->update(0);
        if (node == i) break;
      }
      this->output(i, 0);
    }
  }
  __device__ static void assign(const float (&from)[kLaneRows][kPerLane],
                                float (&to)[kLaneRows][kPerLane]) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r)
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) to[r][e] = from[r][e];
  }
  // A wrong parent counts as none.
  __device__ int parent_of(int i) const {
    const int parent = p_.batch.parent[this->token_ + i];
    return parent < i ? parent : -1;
  }
  __device__ int root_of(int i) const {
    while (parent_of(i) >= 0) i = parent_of(i);
    return i;
  }
  // The ancestor of i, or i itself, that follows `node`.
  __device__ int child_of(int node, int i) const {
    while (parent_of(i) != node) i = parent_of(i);
    return i;
  }

  // Checkpoint and read copy, of the slot that the step writes.
  __device__ void keep() const {
    State* const to = this->checkpoint(target_);
    if (sizeof(State) == 2 && p_.rounding.seed) {
      if constexpr (sizeof(State) == 2) keep_stochastic(to);
    } else {
      this->template store<false>(to);
    }
    this->store_copy(target_);
  }
  // A lane has whole groups of eight columns.
  __device__ void keep_stochastic(State* to) const {
    const uint64_t seed = p_.rounding.seed[slot_], counter = tokens_.first_counter + stored();
    const int groups = (launch_.state_dim + 7) / 8;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      if (!has(r)) continue;
      State* const line = to + int64_t{row(r)} * launch_.state_dim;
#pragma unroll 1
      for (int c = 0; c < Map::kChunks; ++c) {
        const int column = Map::element(c, lane_);
        if (column >= launch_.state_dim) continue;
        const auto at = static_cast<uint32_t>((first_row() + row(r)) * groups + column / 8);
        const auto words = philox({static_cast<uint32_t>(counter),
                                   static_cast<uint32_t>(counter >> 32), p_.rounding.stream, at},
                                  {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
#pragma unroll
        for (int e = 0; e < Map::kElems; ++e) {
          const uint32_t random = words[e / 2] >> (e % 2 * 16) & 0xffffu;
          float x = 0;
#pragma unroll
          for (int chunk = 0; chunk < Map::kChunks; ++chunk)
            x = chunk == c ? s_[r][chunk * Map::kElems + e] : x;
          if (column + e < launch_.state_dim)
            line[column + e] = round_stochastic(x, random, State());
        }
      }
    }
  }

  // The window joins the ring as it came; each block brings what is its rows', the first of a head
  // its gates, the first of a key head its keys.
  __device__ void append() const {
    const int key_head = launch_.group.divide(head_);
    const bool first = block_row_ == 0;
    const bool owns_key = first && key_head * static_cast<int>(launch_.group.divisor) == head_;
    const int rows = min(layout_.rows, launch_.head_dim - block_row_);
    const RecurrentState& ring = p_.state;
    for (int i = 0; i < window_; ++i) {
      const int n = tokens_.history + i;
      const int64_t at = tokens_.scalar(n, head_);
      copy(tokens_.value(n, head_), block_row_, rows, ring.ring_v, at * launch_.head_dim);
      if (owns_key)
        copy(tokens_.key(n, key_head), 0, launch_.state_dim, ring.ring_k,
             (tokens_.row(n) * launch_.key_heads + key_head) * launch_.state_dim);
      if (!first) continue;
      if constexpr (kChannels)
        copy(tokens_.gate(n, head_), 0, launch_.state_dim, ring.ring_gate, at * launch_.state_dim);
      if (threadIdx.x > 0) continue;
      ring.ring_b[at] = tokens_.strength(n, head_);
      if constexpr (!kChannels) ring.ring_g[at] = tokens_.log_decay(n, head_);
    }
  }
  __device__ void copy(const Place& from, int begin, int count, void* to, int64_t at) const {
    for (int e = begin + threadIdx.x; e < begin + count; e += blockDim.x) {
      if (dtype_bytes(p_.state.activation_dtype) == 4) {
        static_cast<uint32_t*>(to)[at + e] = static_cast<const uint32_t*>(from.data)[from.at + e];
      } else {
        static_cast<uint16_t*>(to)[at + e] = static_cast<const uint16_t*>(from.data)[from.at + e];
      }
    }
  }

  int target_ = -1;
};

}  // namespace replayssm::cuda
