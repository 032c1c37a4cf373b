// S t on the tensor cores; sums are fp32.
//
// An instruction multiplies a [16, 16] tile by eight columns. Its rows g and g + 8 are one row of
// S, that of lanes 4 g to 4 g + 3: each of these puts four of eight elements into the former and
// four into the latter, so that its operand is 16 bytes as they lie in memory. A vector t takes two
// columns, the elements that meet the former and those that meet the latter.
#pragma once

#include "ops/cuda/step_parts.cuh"

namespace replayssm::cuda {

template <class Part>
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint2 b) {
  if constexpr (std::is_same_v<Part, Bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
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

// Of the kWords words of a row that a lane has, the operands of unit u: eight elements.
template <class S>
__device__ inline void operands(const uint4* words, int u, uint32_t (&a)[4]) {
  static_assert(sizeof(S) <= 2);
  if constexpr (sizeof(S) == 2) {
    const uint4 word = words[u];
    a[0] = word.x, a[1] = word.y, a[2] = word.z, a[3] = word.w;
  } else {
    const uint32_t* word = reinterpret_cast<const uint32_t*>(words) + 2 * u;
    halves<S>(word[0], a[0], a[1]);
    halves<S>(word[1], a[2], a[3]);
  }
}

// One vector: its parts are three pairs of columns. Its operands stay in registers.
template <class S, int kState>
class TileVector {
 public:
  static constexpr int kUnits = kState / 32;

  // parts: Parts<S, kState>.
  __device__ void load(const char* parts) {
    const int column = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
    const char* const from = parts + column / 2 * (2 * kState) + lane * 16 + column % 2 * 8;
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      b_[u] = column < 2 * kParts ? *reinterpret_cast<const uint2*>(from + u * 64) : uint2{};
  }
  // words: those that this lane has of row lane / 4. The product, in each of the row's lanes.
  __device__ float multiply(const uint4* words) const {
    float c[4] = {};
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      uint32_t a[4];
      operands<S>(words, u, a);
      mma<PartOf<S>>(c, a, b_[u]);
    }
    float sum = c[0] + c[3];  // of part lane % 4, both halves of its elements
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    return sum + __shfl_xor_sync(kAllLanes, sum, 2);
  }

 private:
  uint2 b_[kUnits];
};

// Products of up to kTileVectors vectors with a row: that of vector lane % 4. The first parts'
// products, which are nearly all, have their own sums.
struct TileSums {
  float first[4] = {}, rest[4] = {};
  __device__ float get() const { return (first[0] + first[3]) + (rest[0] + rest[3]); }
};

// words: those that this lane has of row lane / 4; parts: those of `count` vectors, kTileVectors in
// each of the sums.
template <class S, int kState, int kSums>
__device__ inline void multiply_rows(const uint4* words, const char* parts, int count,
                                     TileSums (&sums)[kSums]) {
  constexpr int kStride = Parts<S, kState>::kStride;
  const int vector = threadIdx.x % 32 / 8, which = threadIdx.x / 4 % 2, lane = threadIdx.x % 4;
  const char* const from = parts + vector * kStride + lane * 16 + which * 8;
#pragma unroll
  for (int u = 0; u < kState / 32; ++u) {
    uint32_t a[4];
    operands<S>(words, u, a);
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      if (n * kTileVectors >= count) break;
      uint2 b[kParts] = {};
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        if (n * kTileVectors + vector < count)
          b[part] = *reinterpret_cast<const uint2*>(from + n * kTileVectors * kStride +
                                                    part * 2 * kState + u * 64);
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        mma<PartOf<S>>(part == 0 ? sums[n].first : sums[n].rest, a, b[part]);
    }
  }
}

}  // namespace replayssm::cuda
