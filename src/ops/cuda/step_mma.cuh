// S t of 16-bit and 8-bit states on the tensor cores. The state's elements are exact as 16-bit
// operands; t is the sum of three 16-bit parts, which keep its 24 bits. Sums are fp32.
//
// An instruction multiplies a [16, 16] tile by eight columns. Its rows 0 .. 7 and 8 .. 15 are the
// same eight rows of S, four and four of eight consecutive elements of each lane, so that a lane's
// operand is 16 bytes as they lie in memory: columns 0 .. 2 are the parts of t that meet the
// former, 3 .. 5 those that meet the latter.
#pragma once

#include "ops/cuda/elements.cuh"
#include "ops/cuda/reduce.cuh"

namespace replayssm::cuda {

template <class S>
struct MmaOperand {
  // The 16-bit type that holds S exactly.
  using type = std::conditional_t<std::is_same_v<S, Bf16>, Bf16, Fp16>;
  // fp16 has a small range: its t is scaled.
  static constexpr bool kScaled = !std::is_same_v<S, Bf16>;
};

template <class Operand>
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Operand, Bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Four 8-bit elements as two registers of two halves.
template <class S>
__device__ inline void halves(uint32_t word, uint32_t& low, uint32_t& high) {
  if constexpr (std::is_same_v<S, Fp8>) {
    const __half2_raw a = __nv_cvt_fp8x2_to_halfraw2(word & 0xffffu, __NV_E4M3);
    const __half2_raw b = __nv_cvt_fp8x2_to_halfraw2(word >> 16, __NV_E4M3);
    low = a.x | static_cast<uint32_t>(a.y) << 16;
    high = b.x | static_cast<uint32_t>(b.y) << 16;
  } else {
    // The bits of the half 1024 + u are 0x6400 | u, with u = value + 128.
    const uint32_t biased = word ^ 0x80808080u;
    const __half2 offset = __half2half2(__half(1152.0f));
    const uint32_t a = __byte_perm(biased, 0x64646464u, 0x4140);
    const uint32_t b = __byte_perm(biased, 0x64646464u, 0x4342);
    const __half2 x = __hsub2(*reinterpret_cast<const __half2*>(&a), offset);
    const __half2 y = __hsub2(*reinterpret_cast<const __half2*>(&b), offset);
    low = *reinterpret_cast<const uint32_t*>(&x);
    high = *reinterpret_cast<const uint32_t*>(&y);
  }
}

// t as the second operand, in the registers of a warp.
template <class S, int kState>
class MmaTarget {
 public:
  using Operand = typename MmaOperand<S>::type;
  static constexpr int kElems = 16 / sizeof(S);  // of a lane's word
  static constexpr int kWords = kState / kElems / 4;
  static constexpr int kSteps = kElems / 8;  // instructions per word
  static_assert(kWords > 0);

  // Where word i of this lane lies in its row, and which of eight rows that is.
  __device__ static int element(int i) { return (i * 4 + threadIdx.x % 4) * kElems; }
  __device__ static int row() { return threadIdx.x % 32 / 4; }

  // target: padded fp32 in shared memory; parts: [3, kState] there. All lanes of the warp call.
  __device__ void load(const float* target, uint16_t* parts) {
    const int lane = threadIdx.x % 32, column = lane / 4;
    split(target, parts, lane);
    __syncwarp();
    const uint16_t* from = parts + column % 3 * kState + column / 3 * 2;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          b_[i][s][half] =
              column < 6 ? *reinterpret_cast<const uint32_t*>(from + element(i) + 8 * s + 4 * half)
                         : 0;
    __syncwarp();
  }

  // The product of t with the row whose words these are, in each of its four lanes.
  __device__ float multiply(const uint4* words) const {
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t* word = reinterpret_cast<const uint32_t*>(words + i);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint32_t a[4];
        if constexpr (sizeof(S) == 2) {
#pragma unroll
          for (int e = 0; e < 4; ++e) a[e] = word[e];
        } else {
          halves<S>(word[2 * s], a[0], a[1]);
          halves<S>(word[2 * s + 1], a[2], a[3]);
        }
        mma<Operand>(c, a, b_[i][s][0], b_[i][s][1]);
      }
    }
    // Of this lane's columns 2 lane and 2 lane + 1, rows 0 .. 7 in c[0] and c[1].
    const int lane = threadIdx.x % 4;
    float sum = lane == 0 ? c[0] + c[1] : lane == 1 ? c[0] + c[3] : lane == 2 ? c[2] + c[3] : 0;
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    return inverse_scale_ * sum;
  }

 private:
  __device__ void split(const float* target, uint16_t* parts, int lane) {
    static_assert(kState % 128 == 0 || kState == 64);
    constexpr int kRun = kState == 64 ? 2 : 4;
    float scale = 1;
    inverse_scale_ = 1;
    if constexpr (MmaOperand<S>::kScaled) {
      float most = 0;
      for (int i = lane * kRun; i < kState; i += 32 * kRun)
#pragma unroll
        for (int e = 0; e < kRun; ++e) most = fmaxf(most, fabsf(target[padded_index(i) + e]));
#pragma unroll
      for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, d));
      // The power of two that brings the largest element to [2^13, 2^14).
      const int exponent = static_cast<int>(__float_as_uint(most) >> 23) & 255;
      const int field = min(max(267 - exponent, 1), 253);
      scale = __uint_as_float(field << 23);
      inverse_scale_ = __uint_as_float((254 - field) << 23);
    }
    for (int i = lane * kRun; i < kState; i += 32 * kRun) {
      float x[kRun];
      load_elements<float, kRun>(target + padded_index(i), x);
#pragma unroll
      for (int e = 0; e < kRun; ++e) x[e] *= scale;
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        store_elements<Operand, kRun>(parts + part * kState + i, x);
#pragma unroll
        for (int e = 0; e < kRun; ++e) x[e] -= to_float(from_float<Operand>(x[e]));
      }
    }
  }

  uint32_t b_[kWords][kSteps][2];
  float inverse_scale_ = 1;
};

}  // namespace replayssm::cuda
