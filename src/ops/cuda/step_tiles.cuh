// S t on the tensor cores, 16 rows of S at a time, for the rows of a warp.
#pragma once

#include "ops/cuda/step_context.cuh"
#include "ops/cuda/step_parts.cuh"
#include "ops/cuda/step_stream.cuh"

namespace replayssm::cuda {

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

// 16 rows of S in a group's buffer.
template <class S, int kState>
class StateTile {
 public:
  using G = Group<S, kState, Access::kTiles>;
  static constexpr int kBytes = 16 * G::kRowBytes;
  static constexpr int kSteps = kState / 16;

  __device__ explicit StateTile(char* buffer)
      : lane_(buffer + G::swizzled(threadIdx.x % 16 * G::kRowBytes + threadIdx.x % 32 / 16 * 16)) {}

  // The 32 bytes of each row from 32 n on: one step's operand, of 8-bit states two steps'.
  __device__ void load(int n, uint32_t (&a)[4]) const { load_tiles(a, word(n)); }
  __device__ void store(int n, const uint32_t (&a)[4]) const { store_tiles(word(n), a); }

  // Calls fn(k, a) with the operand of 16 columns, for all of them.
  template <class Fn>
  __device__ void for_steps(Fn&& fn) const {
#pragma unroll
    for (int n = 0; n < G::kRowBytes / 32; ++n) {
      uint32_t words[4];
      load(n, words);
      if constexpr (!kIs8Bit<S>) {
        fn(n, words);
      } else {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) halves<S>(words[i], a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
        fn(2 * n, a[0]);
        fn(2 * n + 1, a[1]);
      }
    }
  }

 private:
  __device__ char* word(int n) const {
    const auto at = reinterpret_cast<uintptr_t>(lane_) ^ static_cast<uintptr_t>(n * 32);
    return reinterpret_cast<char*>(at);
  }

  char* const lane_;  // this lane's row of the first 32 bytes
};

// One token's target: its parts are columns, in registers.
template <class S, int kState, int kCount>
class TileVector {
 public:
  // parts: of kCount parts, kState + 8 operands apart.
  __device__ void load(const void* parts) {
    const int lane = threadIdx.x % 32;
    const auto* const from = static_cast<const uint16_t*>(parts) +
                             min(lane % 8, kCount - 1) * row_stride(kState, 2) + lane / 8 * 8;
#pragma unroll
    for (int n = 0; n < kState / 32; ++n) load_tiles(b_[n], from + 32 * n);
  }
  // o[h]: of row lane / 4 + 8 h, in lanes that are multiples of four.
  __device__ void multiply(const StateTile<S, kState>& tile, float (&o)[2]) const {
    float c[2][4] = {};
    tile.for_steps([&](int k, const uint32_t(&a)[4]) {
      multiply_tile<PartOf<S>>(c[k % 2], a, b_[k / 2][k % 2 * 2], b_[k / 2][k % 2 * 2 + 1]);
    });
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float first = c[0][2 * h] + c[1][2 * h];
      o[h] = first;
      if constexpr (kCount > 1) {
        static_assert(kCount == 3);
        o[h] += c[0][2 * h + 1] + c[1][2 * h + 1];
        o[h] += __shfl_down_sync(kAllLanes, first, 1);
      }
    }
  }

 private:
  uint32_t b_[kState / 32][4];
};

// Eight tokens' targets: columns, with a sum for the first parts, which are nearly all, and one for
// the rest.
template <class S, int kState, int kCount>
class TileVectors {
 public:
  // parts: of this lane's column, token lane % 8.
  __device__ explicit TileVectors(const void* parts)
      : from_(static_cast<const uint16_t*>(parts) + threadIdx.x % 32 / 8 * 8) {}

  // o[2 h + e]: of row lane / 4 + 8 h and token 2 (lane % 4) + e.
  __device__ void multiply(const StateTile<S, kState>& tile, float (&o)[4]) const {
    float first[4] = {}, rest[4] = {};
    uint32_t b[kCount][4];
    tile.for_steps([&](int k, const uint32_t(&a)[4]) {
#pragma unroll
      for (int part = 0; part < kCount; ++part) {
        if (k % 2 == 0) load_tiles(b[part], from_ + part * row_stride(kState, 2) + k * 16);
        multiply_tile<PartOf<S>>(part == 0 && (kCount > 1 || k % 2 == 0) ? first : rest, a,
                                 b[part][k % 2 * 2], b[part][k % 2 * 2 + 1]);
      }
    });
#pragma unroll
    for (int e = 0; e < 4; ++e) o[e] = first[e] + rest[e];
  }

 private:
  const uint16_t* const from_;
};

// fp32 states and eight tokens. words: this lane's of row lane / 4, of two passes; halves: the
// target of token lane / 4. o[n][e]: of that token and row 2 (lane % 4) + e of pass n. States are
// taken in two halves as targets are; the rows of an instruction are the tokens, first halves, then
// second.
template <int kState>
__device__ inline void multiply_halves(const uint4 (&words)[2][kGroupWords], const void* halves,
                                       float (&o)[2][2]) {
  static_assert(kState == 16 * kGroupWords);
  const auto* const from = static_cast<const float4*>(halves) + threadIdx.x % 4 * 2;
  float high[2][4] = {}, low[2][4] = {};
#pragma unroll
  for (int w = 0; w < kGroupWords; ++w) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const float4 a = from[8 * w + pair];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float s[2], first[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t bits = reinterpret_cast<const uint32_t*>(&words[n][w])[2 * pair + e];
          s[e] = __uint_as_float(bits);
          first[e] = __uint_as_float(bits & 0xffffe000u);
        }
        multiply_halves_tile(high[n], a, first[0], first[1]);
        multiply_halves_tile(low[n], a, s[0] - first[0], s[1] - first[1]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      o[n][e] = (high[n][e] + high[n][2 + e]) + (low[n][e] + low[n][2 + e]);
}

}  // namespace replayssm::cuda
