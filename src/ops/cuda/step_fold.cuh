// Folds on the tensor cores, of 16-bit states with at most kMostTileRows rows of ring:
//
//   S' = e^{D_0} S + sum_j e^{D_j} y_j k_j^T,   D_j: the log decay of all rows behind j
//   Mamba-2      y_j = b_j v_j
//   delta rule   y_j = b_j f_j (v_j - f_j h_j),  h_j = a_j .. a_0 S k_j + sum_m<j of
//                a_j .. a_{m+1} (k_m . k_j) y_m
//
// with raw keys and f = 1 / |k|. S k_j and the sum are products of operands that are exact, or keep
// 16 bits where the result is rounded to at most 11.
#pragma once

#include "ops/cuda/step_tiles.cuh"

namespace replayssm::cuda {

template <class Context, class Checkpoint>
class TileFold {
 public:
  using Shared = typename Context::Shared;
  static constexpr int kState = Shared::kPerLane * kRowLanes;
  static constexpr bool kDelta = is_delta(Context::kFamily);
  using Tile = StateTile<Checkpoint, kState>;

  __device__ explicit TileFold(const Context& context) : c_(context) {}

  // 16 rows of a head, from the block's `column` on; stores `count` of them. The tile is in shared
  // memory, where it changes too.
  __device__ void run(char* buffer, int head, int column, int count) const {
    const Tile tile(buffer);
    if constexpr (kDelta) multiply_keys(tile);
    form_writes(head, column, count);
    __syncwarp();
    update(tile, c_.shared.fold_terms(head).total);
    __syncwarp();
    store(buffer, column, count);
  }

 private:
  static constexpr int kHandParts = 2;
  static_assert(kMostTileRows == 16);

  // What is handed over, in orders that let eight lanes meet no bank twice: four numbers of a row
  // from 4 n on; eight operands of a part from 8 n on.
  __device__ float4* known(int row, int n) const {
    return reinterpret_cast<float4*>(c_.shared.fold_rows()) + row * 4 + (n ^ (row / 2 % 4));
  }
  __device__ uint4* writes(int part, int row, int n) const {
    return reinterpret_cast<uint4*>(c_.shared.fold_rows()) + (part * 16 + row) * 2 +
           (n ^ (row / 4 % 2));
  }

  // Where row lane % 16 of keys lies, or zeros.
  __device__ const Bf16* key(int row, int offset, int column) const {
    return row < c_.b.aside ? c_.shared.key(row) + offset + column
                            : static_cast<const Bf16*>(c_.shared.zeros());
  }

  // Hands over S k_j.
  __device__ void multiply_keys(const Tile& tile) const {
    const int lane = c_.lane(), row = lane / 16 * 8 + lane % 8;
    float sum[2][4] = {};
    tile.for_steps([&](int k, const uint32_t(&a)[4]) {
      uint32_t b[4];
      load_tiles(b, key(row, lane / 8 % 2 * 8, 16 * k));
      multiply_tile<Bf16>(sum[0], a, b[0], b[1]);
      multiply_tile<Bf16>(sum[1], a, b[2], b[3]);
    });
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        reinterpret_cast<float2*>(known(half * 8 + lane / 4, 2 * n + lane % 4 / 2))[lane % 2] = {
            sum[n][2 * half], sum[n][2 * half + 1]};
    __syncwarp();
  }

  // Hands over e^{D_j} y_j as operands. Lanes 0 to 15 have a row of S each.
  __device__ void form_writes(int head, int column, int count) const {
    const int lane = c_.lane() % 16;
    const FoldTerms& terms = c_.shared.fold_terms(head);
    const FoldMatrix& delta = c_.shared.fold_matrix(head);
    const Bf16* const values = c_.shared.value(0) + column + min(lane, count - 1);
    float h[kMostTileRows];
    if constexpr (kDelta) {
#pragma unroll
      for (int n = 0; n < 4; ++n) *reinterpret_cast<float4*>(h + 4 * n) = *known(lane, n);
#pragma unroll
      for (int j = 0; j < kMostTileRows; ++j) h[j] *= delta.before[j];
      __syncwarp();
    }
    uint32_t operands[kHandParts][4];
    float pair[2];
#pragma unroll
    for (int j = 0; j < kMostTileRows; ++j) {
      float y = j < c_.b.aside ? to_float(values[j * c_.shared.value_stride()]) : 0.0f;
      if constexpr (kDelta) y = fmaf(-delta.known[j], h[j], y);
      y *= terms.write[j];
      if constexpr (kDelta) {
#pragma unroll
        for (int later = j + 1; later < kMostTileRows; ++later)
          h[later] = fmaf(delta.matrix[j][later], y, h[later]);
      }
      pair[j % 2] = terms.behind[j] * y;
      if (j % 2 == 0) continue;
#pragma unroll
      for (int part = 0; part < kHandParts; ++part) {
        operands[part][j / 2 % 4] = take_part<Bf16>(pair);
        if (j % 8 == 7 && c_.lane() < 16)
          *writes(part, lane, j / 8) = *reinterpret_cast<const uint4*>(operands[part]);
      }
    }
  }

  // S' in place of S.
  __device__ void update(const Tile& tile, float total) const {
    const int lane = c_.lane(), row = lane % 16;
    uint32_t w[kHandParts][4];
#pragma unroll
    for (int part = 0; part < kHandParts; ++part) load_tiles(w[part], writes(part, row, lane / 16));
#pragma unroll
    for (int n = 0; n < kState / 16; ++n) {
      uint32_t b[4], s[4];
      load_tiles_transposed(b, key(row, lane / 16 * 8, 16 * n));
      tile.load(n, s);
      float sum[2][4] = {};
#pragma unroll
      for (int part = kHandParts - 1; part >= 0; --part) {
        multiply_tile<Bf16>(sum[0], w[part], b[0], b[1]);
        multiply_tile<Bf16>(sum[1], w[part], b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // tile i: rows i % 2, columns i / 2
        float x[2];
        widen<Checkpoint>(s[i], x);
#pragma unroll
        for (int e = 0; e < 2; ++e) x[e] = fmaf(total, x[e], sum[i / 2][i % 2 * 2 + e]);
        s[i] = narrow<Checkpoint>(x);
      }
      tile.store(n, s);
    }
  }

  __device__ void store(const char* buffer, int column, int count) const {
    using G = typename Tile::G;
    const int64_t row =
        (static_cast<int64_t>(c_.b.target) * c_.launch.heads + c_.b.head) * c_.launch.head_dim +
        c_.b.row + column;
    char* const to = static_cast<char*>(c_.p.state.checkpoint) + row * G::kRowBytes;
#pragma unroll
    for (int i = 0; i < Tile::kBytes / (32 * 16); ++i) {
      const int at = c_.lane() * 16 + i * 32 * 16;
      if (at < count * G::kRowBytes)
        *reinterpret_cast<uint4*>(to + at) =
            *reinterpret_cast<const uint4*>(buffer + G::swizzled(at));
    }
  }

  const Context& c_;
};

}  // namespace replayssm::cuda
