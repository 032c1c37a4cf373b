// S t on the tensor cores, sixteen rows of S by eight columns at a time; sums are fp32.
//
// An instruction takes four elements of rows g and g + 8 from each lane (g = lane / 4). Which
// columns of S those are is free as long as t goes along, so that a lane's operands are words as
// they lie in memory.
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

// Words of a tile: kWords of row g of a state, then as many of row g + 8. Word i of a row is its
// word 4 i + lane % 4, counted from where the tile begins.
template <class S, int kState, int kWords>
struct Tile {
  using Part = PartOf<S>;
  static constexpr int kElems = 16 / sizeof(S);  // of a word
  static constexpr int kSteps = kElems / 4;      // instructions per word
  static constexpr int kStepBytes = 8;           // of a part that one instruction meets

  // The bytes of a part that this lane's word i meets.
  __device__ static int part_offset(int i) { return (i * 4 + threadIdx.x % 4) * kElems * 2; }

  // Operands of step s of word i, both rows. fp32: those of the first part; x keeps the rest.
  __device__ static void operands(const uint4* words, int i, int s, uint32_t (&a)[4]) {
    const uint32_t* upper = reinterpret_cast<const uint32_t*>(words + i);
    const uint32_t* lower = reinterpret_cast<const uint32_t*>(words + kWords + i);
    if constexpr (sizeof(S) == 2) {
      a[0] = upper[2 * s], a[1] = lower[2 * s], a[2] = upper[2 * s + 1], a[3] = lower[2 * s + 1];
    } else {
      halves<S>(upper[s], a[0], a[2]);
      halves<S>(lower[s], a[1], a[3]);
    }
  }
};

// One vector: its parts are three columns. Its operands stay in registers.
template <class S, int kState, int kWords>
class TileVector {
 public:
  using T = Tile<S, kState, kWords>;

  // parts: Parts<S, kState>.
  __device__ void load(const char* parts) {
    const int part = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
#pragma unroll
      for (int s = 0; s < T::kSteps; ++s)
        b_[i][s] = part < kParts
                       ? *reinterpret_cast<const uint2*>(parts + part * 2 * kState +
                                                         T::part_offset(i) + s * T::kStepBytes)
                       : uint2{};
  }
  // The products with rows g and g + 8, in the first of their four lanes.
  __device__ float2 multiply(const uint4* words) const {
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < kWords; ++i)
#pragma unroll
      for (int s = 0; s < T::kSteps; ++s) {
        uint32_t a[4];
        T::operands(words, i, s, a);
        mma<typename T::Part>(c, a, b_[i][s]);
      }
    // Columns 2 (lane % 4) and the next: row g in c[0] and c[1], row g + 8 in c[2] and c[3].
    const float upper = __shfl_down_sync(kAllLanes, c[0], 1);
    const float lower = __shfl_down_sync(kAllLanes, c[2], 1);
    return {c[0] + (c[1] + upper), c[2] + (c[3] + lower)};
  }

 private:
  uint2 b_[kWords][T::kSteps];
};

// Products of up to kTileQueries vectors with rows g and g + 8: vectors 2 (lane % 4) and the next
// with row g, then both with row g + 8. The first parts' products, which are nearly all, have their
// own sums.
struct TileSums {
  float first[4] = {}, rest[4] = {};
  __device__ float get(int i) const { return first[i] + rest[i]; }
};

// Four fp32 elements of two rows: of the nine products of parts the six that matter.
__device__ inline void multiply_fp32(const float* upper, const float* lower, uint2 b0, uint2 b1,
                                     uint2 b2, TileSums& sums) {
  float x[2][4];
#pragma unroll
  for (int e = 0; e < 4; ++e) x[0][e] = upper[e], x[1][e] = lower[e];
  const uint2 b[kParts] = {b0, b1, b2};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    uint32_t a[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[2 * half] = narrow<Bf16>(x[0] + 2 * half);
      a[2 * half + 1] = narrow<Bf16>(x[1] + 2 * half);
    }
#pragma unroll
    for (int other = 0; other < kParts - part; ++other)
      mma<Bf16>(part + other == 0 ? sums.first : sums.rest, a, b[other]);
    if (part + 1 < kParts) {
      subtract_part<Bf16>(x[0]);
      subtract_part<Bf16>(x[1]);
    }
  }
}

// parts: those of the first vector; offset: where in a part the tile begins. Vectors from `count`
// on are zero.
template <class S, int kState, int kWords>
__device__ inline void multiply_tile(const uint4* words, const char* parts, int offset, int count,
                                     TileSums& sums) {
  using T = Tile<S, kState, kWords>;
  using Part = typename T::Part;
  const int column = threadIdx.x % 32 / 4;
  const bool on = column < count;
  const char* const from = parts + column * Parts<S, kState>::kStride + offset;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    constexpr int kRun = T::kSteps < 2 ? 1 : 2;  // steps whose operands are one word
#pragma unroll
    for (int s = 0; s < T::kSteps; s += kRun) {
      uint2 b[kParts][kRun] = {};
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        if (on)
          *reinterpret_cast<Word<8 * kRun>*>(b[part]) = *reinterpret_cast<const Word<8 * kRun>*>(
              from + part * 2 * kState + T::part_offset(i) + s * T::kStepBytes);
      if constexpr (sizeof(S) == 4) {
        multiply_fp32(reinterpret_cast<const float*>(words + i),
                      reinterpret_cast<const float*>(words + kWords + i), b[0][0], b[1][0], b[2][0],
                      sums);
      } else {
#pragma unroll
        for (int u = 0; u < kRun; ++u) {
          uint32_t a[4];
          T::operands(words, i, s + u, a);
          mma<Part>(sums.first, a, b[0][u]);
          mma<Part>(sums.rest, a, b[1][u]);
          mma<Part>(sums.rest, a, b[2][u]);
        }
      }
    }
  }
}

}  // namespace replayssm::cuda
