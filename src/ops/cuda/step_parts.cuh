// Vectors that meet states on the tensor cores. The elements of a 16-bit or 8-bit state are exact
// as 16-bit operands; a vector is the sum of parts that keep its 24 bits.
#pragma once

#include "ops/cuda/mma.cuh"

namespace replayssm::cuda {

// The operands that meet states of S.
template <class S>
using PartOf = std::conditional_t<std::is_same_v<S, Bf16> || std::is_same_v<S, float>, Bf16, Fp16>;

// Four consecutive 8-bit states become two operands of a lane that are eight columns apart: of each
// eight pairs of a vector's elements the places are 0 4 1 5 2 6 3 7.
template <class S>
__device__ inline int part_index(int element) {
  if constexpr (!kIs8Bit<S>) return element;
  const int pair = element / 2 % 8;
  return element / 16 * 16 + (pair / 2 + pair % 2 * 4) * 2 + element % 2;
}

// The power of two that brings `most` to [2^13, 2^14), where fp16 has its precision; its inverse.
__device__ inline float half_scale(float most, float& inverse) {
  const int exponent = static_cast<int>(__float_as_uint(most) >> 23) & 255;
  const int field = min(max(267 - exponent, 1), 253);
  inverse = __uint_as_float((254 - field) << 23);
  return __uint_as_float(field << 23);
}

// Stores the parts, `stride` operands apart, of the pair of elements from `element` on.
template <class S, int kCount>
__device__ inline void store_parts(void* parts, int stride, int element, float x, float y) {
  using Part = PartOf<S>;
  Part* const to = static_cast<Part*>(parts) + part_index<S>(element);
  float pair[2] = {x, y};
#pragma unroll
  for (int part = 0; part < kCount; ++part)
    *reinterpret_cast<uint32_t*>(to + part * stride) = take_part<Part>(pair);
}

// The operands that meet fp32 states: numbers in two halves, each of the 11 bits that the tensor
// cores take. A pair of elements is 16 bytes, in the order of an instruction's operand.
__device__ inline void store_halves(void* halves, int element, float x, float y) {
  const float high_x = __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
  const float high_y = __uint_as_float((__float_as_uint(y) + 0x1000u) & 0xffffe000u);
  static_cast<float4*>(halves)[element / 2] = {high_x, x - high_x, high_y, y - high_y};
}

}  // namespace replayssm::cuda
