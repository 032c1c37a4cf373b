// S t of 16-bit and 8-bit states on the tensor cores. The state's elements are exact as 16-bit
// operands; t is the sum of three 16-bit parts, which keep its 24 bits, one column each. Sums are
// fp32. Which columns of S an instruction calls k is free, so that each lane loads its operands as
// 16 consecutive bytes.
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
  static constexpr int kElems = 16 / sizeof(S);  // of a lane's load
  static constexpr int kLoads = kState / kElems / 4;
  static constexpr int kSteps = kState / 16, kStepsPerLoad = kElems / 4;
  static_assert(kLoads > 0);

  // target: padded fp32 in shared memory; parts: [3, kState] there. All lanes of the warp call.
  __device__ void load(const float* target, uint16_t* parts) {
    const int lane = threadIdx.x % 32, column = lane / 4;
    split(target, parts, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint16_t* from = parts + column * kState + (i * 4 + lane % 4) * kElems;
#pragma unroll
      for (int s = 0; s < kStepsPerLoad; ++s) {
        uint2 word{0, 0};
        if (column < 3) word = *reinterpret_cast<const uint2*>(from + 4 * s);
        b_[i * kStepsPerLoad + s][0] = word.x;
        b_[i * kStepsPerLoad + s][1] = word.y;
      }
    }
    __syncwarp();
  }

  // The products with rows `low` and `high` of this lane's pair (lane / 4, and eight below): valid
  // in lanes that are multiples of 4.
  __device__ float2 multiply(const S* low, const S* high) const {
    const int lane = threadIdx.x % 4;
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(low + (i * 4 + lane) * kElems);
      const uint4 y = *reinterpret_cast<const uint4*>(high + (i * 4 + lane) * kElems);
      const uint32_t* xs = reinterpret_cast<const uint32_t*>(&x);
      const uint32_t* ys = reinterpret_cast<const uint32_t*>(&y);
#pragma unroll
      for (int s = 0; s < kStepsPerLoad; ++s) {
        uint32_t a[4];
        if constexpr (sizeof(S) == 2) {
          a[0] = xs[2 * s];
          a[1] = ys[2 * s];
          a[2] = xs[2 * s + 1];
          a[3] = ys[2 * s + 1];
        } else {
          halves<S>(xs[s], a[0], a[2]);
          halves<S>(ys[s], a[1], a[3]);
        }
        const auto& b = b_[i * kStepsPerLoad + s];
        mma<Operand>(c, a, b[0], b[1]);
      }
    }
    // Columns 0 and 1 are in this lane, column 2 in the next.
    const float x = __shfl_xor_sync(kAllLanes, c[0], 1), y = __shfl_xor_sync(kAllLanes, c[2], 1);
    return make_float2(inverse_scale_ * (c[0] + (c[1] + x)), inverse_scale_ * (c[2] + (c[3] + y)));
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

  uint32_t b_[kSteps][2];
  float inverse_scale_ = 1;
};

}  // namespace replayssm::cuda
