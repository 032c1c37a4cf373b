// The operands of the tensor cores. A state's 16-bit and 8-bit elements are exact as 16-bit
// operands; a vector that meets them, and an fp32 state, is the sum of three 16-bit parts that keep
// its 24 bits.
#pragma once

#include "ops/cuda/elements.cuh"
#include "ops/cuda/reduce.cuh"

namespace replayssm::cuda {

// The operands that meet states of S.
template <class S>
using PartOf = std::conditional_t<std::is_same_v<S, Bf16> || std::is_same_v<S, float>, Bf16, Fp16>;

// x becomes what is left of it.
template <class Part, int kCount>
__device__ inline void subtract_part(float (&x)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) x[e] -= to_float(from_float<Part>(x[e]));
}

// The parts of a vector that meets states of S, in shared memory.
template <class S, int kState>
struct Parts {
  using Part = PartOf<S>;
  using Map = RowMap<float, kState>;
  static constexpr int kPerLane = kState / kRowLanes;
  static constexpr int kStride = parts_stride(kState, sizeof(S));
  static constexpr int kPartBytes = 2 * kState;

  // Eight lanes store a vector that they share; returns what its products are to be scaled by.
  __device__ static float store(char* base, int lane, float (&t)[kPerLane]) {
    float scale = 1, inverse = 1;
    if constexpr (std::is_same_v<Part, Fp16>) {  // its range is small
      float most = 0;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) most = fmaxf(most, fabsf(t[e]));
      // The power of two that brings the largest element to [2^13, 2^14).
      const int exponent = static_cast<int>(__float_as_uint(row_max(most)) >> 23) & 255;
      const int field = min(max(267 - exponent, 1), 253);
      scale = __uint_as_float(field << 23);
      inverse = __uint_as_float((254 - field) << 23);
    }
#pragma unroll
    for (int c = 0; c < Map::kChunks; ++c) {
      float x[Map::kElems];
#pragma unroll
      for (int e = 0; e < Map::kElems; ++e) x[e] = scale * t[c * Map::kElems + e];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        store_elements<Part, Map::kElems>(base + part * kPartBytes + 2 * Map::element(c, lane), x);
        subtract_part<Part>(x);
      }
    }
    return inverse;
  }
};

}  // namespace replayssm::cuda
