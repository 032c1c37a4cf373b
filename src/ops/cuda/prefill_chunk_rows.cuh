// The state of prompts in chunks: a warp has 16 rows of it in its registers, as accumulators of
// products. Element (row, column) is in tile column / 8.
#pragma once

#include "ops/cuda/mma.cuh"
#include "ops/cuda/reduce.cuh"
#include "replayssm/ops.h"

namespace replayssm::cuda {

// Blocks: (heads and slices of their rows, sequences).
template <class Tile, class State>
class ChunkRows {
 public:
  static constexpr int kState = Tile::kState, kColumnTiles = kState / 8;

  explicit __device__ ChunkRows(const RecurrentPrefillParams& p)
      : p_(p),
        me_(static_cast<int>(threadIdx.x % Tile::kThreads)),
        lane_(me_ % 32),
        warp_(me_ / 32),
        slot_(p.batch.slot[blockIdx.y]) {}

 protected:
  // Two tiles of accumulators: [16 tokens, 16 rows] or [16 rows, 16 tokens].
  using Pair = float[2][4];

  // Left operand of a product: rows of the warp, 16 columns.
  using Factors = float[4];  // of a lane's columns
  struct Split {
    uint32_t high[4], low[4];
    __device__ Split(const float (&left)[4], const float (&right)[4], const Factors& factor) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = (i < 2 ? left : right) + i % 2 * 2;
        const float* f = factor + i / 2 * 2;
        const SplitPair pair = split_pair(x[0] * f[0], x[1] * f[1]);
        high[i] = pair.high, low[i] = pair.low;
      }
    }
  };

  // The first of this block's rows, of all heads'.
  __device__ static int64_t first_row() { return int64_t{blockIdx.x} * Tile::kDim; }
  __device__ int64_t all_rows() const { return p_.shape.heads * p_.shape.head_dim; }
  // The first of this warp's rows.
  __device__ int row0() const { return warp_ * 16; }
  __device__ int64_t state_row(int half) const {
    return slot_ * all_rows() + first_row() + row0() + lane_ / 4 + 8 * half;
  }
  __device__ void load_state() {
    const auto* state = static_cast<const State*>(p_.state.checkpoint);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      for (int c = 0; c < kColumnTiles; ++c) {
        const State* from = state + state_row(h) * kState + c * 8 + lane_ % 4 * 2;
        s_[c][2 * h] = to_float(from[0]);
        s_[c][2 * h + 1] = to_float(from[1]);
      }
  }

  // Checkpoint and read copy.
  __device__ void store_state() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      store_row(static_cast<State*>(p_.state.checkpoint), h, 1, 0);
      const ReadCopy& copy = p_.state.read_copy;
      if (copy.data == nullptr) continue;
      if (copy.dtype == DType::kFloat16) store_row(static_cast<Fp16*>(copy.data), h, 1, 0);
      if (copy.dtype == DType::kBFloat16) store_row(static_cast<Bf16*>(copy.data), h, 1, 0);
      if (dtype_bytes(copy.dtype) > 1) continue;
      float most = 0;
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
        most = fmaxf(most, fmaxf(fabsf(s_[c][2 * h]), fabsf(s_[c][2 * h + 1])));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      float scale = most / dtype_max_8bit(copy.dtype);
      if (scale < 0x1p-126f) scale = 0;
      const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
      if (copy.dtype == DType::kInt8) {
        store_row(static_cast<Int8*>(copy.data), h, inverse, scale);
      } else {
        store_row(static_cast<Fp8*>(copy.data), h, inverse, scale);
      }
      if (lane_ % 4 == 0) copy.scale[state_row(h)] = scale;
    }
  }
  // scale, inverse: of 8-bit rows.
  template <class T>
  __device__ void store_row(T* base, int h, float inverse, float scale) const {
    T* to = base + state_row(h) * kState + lane_ % 4 * 2;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      float x[4] = {s_[c][2 * h], s_[c][2 * h + 1]};
      if constexpr (kIs8Bit<T>) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float q = x[e] * inverse;  // a quotient is this and a correction
          x[e] = fmaf(fmaf(-q, scale, x[e]), inverse, q);
        }
        *reinterpret_cast<uint16_t*>(to + c * 8) = static_cast<uint16_t>(narrow<T>(x));
      } else {
        to[c * 8] = from_float<T>(x[0]);
        to[c * 8 + 1] = from_float<T>(x[1]);
      }
    }
  }

  const RecurrentPrefillParams& p_;
  const int me_, lane_, warp_, slot_;
  float s_[kColumnTiles][4];
};

}  // namespace replayssm::cuda
