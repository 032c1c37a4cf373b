// What ring and window rows add to the outputs: sum_j c_j v_j, for the rows of a warp.
#pragma once

#include "ops/cuda/step_context.cuh"

namespace replayssm::cuda {

template <class Context>
class Mix {
 public:
  __device__ explicit Mix(const Context& context) : c_(context) {}

  // outputs = the sums, of columns [begin, end) of a head.
  __device__ void run(int head, int begin, int end) const {
    if (c_.b.reads_after) return keep_skipped(head, begin, end);
    if constexpr (Context::kOperands) {
#pragma unroll 1
      for (int at = begin; at < end; at += 16 * kTiles)
#pragma unroll 1
        for (int i = 0; i < c_.b.window; i += 8) mix_tiles(head, i, at, end);
    } else {
#pragma unroll 1
      for (int at = begin + c_.lane() * 2; at < end; at += 64)
#pragma unroll 1
        for (int i = 0; i < c_.b.window; ++i) mix_pair(head, i, at);
    }
  }

 private:
  static constexpr int kTiles = 4;  // of 16 columns
  using Element = typename Context::Element;

  // No row is mixed in: a token's own value alone may count.
  __device__ void keep_skipped(int head, int begin, int end) const {
    const float skip = c_.skip(head);
#pragma unroll 1
    for (int i = 0; i < c_.b.window; ++i)
#pragma unroll 1
      for (int at = begin + c_.lane(); at < end; at += 32)
        c_.shared.outputs(i)[at] = skip * to_float(c_.shared.value(c_.b.history + i)[at]);
  }

  // Eight tokens from `first` on.
  __device__ void mix_tiles(int head, int first, int begin, int end) const {
    const int lane = c_.lane(), stride = c_.launch.layout.weight_stride;
    const int part_stride = c_.launch.layout.tokens * stride;
    // Lanes 0 to 15 say where two parts' tiles lie, the others the same of the next.
    const Bf16* const weights =
        c_.shared.weights(0, head, min(first + lane % 8, c_.b.window - 1)) + lane / 8 % 2 * 8;
    const Element* const values =
        c_.shared.value(lane / 16 * 8 + lane % 8) + begin + lane / 8 % 2 * 8;
    float sum[kTiles][4] = {};
#pragma unroll 1
    for (int k = c_.b.first_mixed() / 16 * 16; k < c_.b.rows; k += 16) {
      uint32_t most[4], least[2];
      load_tiles(most, weights + (lane / 16) * part_stride + k);
      load_tiles(least, weights + 2 * part_stride + k);
      const bool is_row = k + lane / 16 * 8 + lane % 8 < c_.b.rows;
      const Element* const from = values + k * c_.shared.value_stride();
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (begin + 16 * n >= end) break;
        uint32_t v[4];
        load_tiles_transposed(v, is_row ? from + 16 * n : c_.shared.zeros());
        multiply_tile<Element>(sum[n], v, most[0], most[1]);
        multiply_tile<Element>(sum[n], v, most[2], most[3]);
        multiply_tile<Element>(sum[n], v, least[0], least[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = begin + 16 * n + 8 * half;
        if (at >= end) break;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = first + lane % 4 * 2 + e;
          if (i < c_.b.window) c_.shared.outputs(i)[at + lane / 4] = sum[n][2 * half + e];
        }
      }
  }

  __device__ void mix_pair(int head, int i, int at) const {
    const float* const weights = c_.shared.plain_weights(head, i);
    float2 sum = {};
#pragma unroll 4
    for (int j = c_.b.first_mixed(); j < c_.b.rows; ++j) {
      if (weights[j] == 0) continue;
      float v[2];
      load_elements<Element, 2>(c_.shared.value(j) + at, v);
      sum.x = fmaf(weights[j], v[0], sum.x);
      sum.y = fmaf(weights[j], v[1], sum.y);
    }
    *reinterpret_cast<float2*>(c_.shared.outputs(i) + at) = sum;
  }

  const Context& c_;
};

}  // namespace replayssm::cuda
