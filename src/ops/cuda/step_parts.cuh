// The operands of the tensor cores. A state's 16-bit and 8-bit elements are exact as 16-bit
// operands; a vector that meets them is the sum of three 16-bit parts that keep its 24 bits.
#pragma once

#include "ops/cuda/elements.cuh"
#include "ops/cuda/reduce.cuh"

namespace replayssm::cuda {

// The operands that meet states of S.
template <class S>
using PartOf = std::conditional_t<std::is_same_v<S, Bf16> || std::is_same_v<S, float>, Bf16, Fp16>;

// The next part of two numbers, packed; they become what is left.
template <class Part>
__device__ inline uint32_t take_part(float* x) {
  const uint32_t part = narrow<Part>(x);
  float y[2];
  widen<Part>(part, y);
  x[0] -= y[0];
  x[1] -= y[1];
  return part;
}

// The parts of a vector that meets states of S, in shared memory: [kParts, kState], in the order in
// which the lanes of a tile take them. A lane meets eight elements of a row at a time: a unit.
// Those are its next ones in memory, of fp32 four and four. The order in a unit is 0 1 4 5 2 3 6 7.
template <class S, int kState>
struct Parts {
  using Part = PartOf<S>;
  static constexpr int kStride = parts_stride(kState);
  static constexpr int kPartBytes = 2 * kState;

  // Where the pair of elements from `element` on lies in a part, in bytes.
  __device__ static int offset(int element) {
    constexpr int kElems = 16 / sizeof(S);  // of a word of 16 bytes
    const int word = element / (4 * kElems), lane = element / kElems % 4, rest = element % kElems;
    const int unit = sizeof(S) == 2 ? word : 2 * word + rest / 8, pair = rest % 8 / 2;
    const int place = (pair & 1) * 2 + (pair >> 1);
    return ((unit * 4 + lane) * 4 + place) * 4;
  }

  // What a vector with this largest magnitude is multiplied by: fp16 has a small range. inverse:
  // what products are multiplied by in turn.
  __device__ static float scale(float most, float& inverse) {
    inverse = 1;
    if constexpr (!std::is_same_v<Part, Fp16>) return 1;
    // The power of two that brings the largest element to [2^13, 2^14).
    const int exponent = static_cast<int>(__float_as_uint(most) >> 23) & 255;
    const int field = min(max(267 - exponent, 1), 253);
    inverse = __uint_as_float((254 - field) << 23);
    return __uint_as_float(field << 23);
  }

  // Stores the pair of elements from `element` on.
  __device__ static void store(char* base, int element, float x, float y) {
    const int at = offset(element);
    float pair[2] = {x, y};
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      *reinterpret_cast<uint32_t*>(base + part * kPartBytes + at) = take_part<Part>(pair);
  }
};

}  // namespace replayssm::cuda
