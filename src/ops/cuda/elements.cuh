// Elements of states, rings and activations on the device: their types, conversions, and how a row
// of a state lies in the registers of the eight lanes that share it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "ops/cuda/padded_rows.h"
#include "replayssm/types.h"

namespace replayssm::cuda {

using Bf16 = __nv_bfloat16;
using Fp16 = __half;
using Fp8 = __nv_fp8_e4m3;
using Int8 = int8_t;

template <class T>
inline constexpr bool kIs8Bit = sizeof(T) == 1;

template <class T>
constexpr DType device_dtype() {
  if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
  if constexpr (std::is_same_v<T, Fp16>) return DType::kFloat16;
  if constexpr (std::is_same_v<T, Bf16>) return DType::kBFloat16;
  if constexpr (std::is_same_v<T, Fp8>) return DType::kFloat8E4M3;
  return DType::kInt8;
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(Bf16 x) { return __bfloat162float(x); }
__device__ inline float to_float(Fp16 x) { return __half2float(x); }

template <class T>
__device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  if constexpr (std::is_same_v<T, Bf16>) return __float2bfloat16_rn(x);
  if constexpr (std::is_same_v<T, Fp16>) return __float2half_rn(x);
}

// kBytes of memory that move as one word.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <int kBytes>
using Word = typename WordOf<kBytes>::type;

// Four bytes at a time: the elements of one 32-bit register.
template <class T>
__device__ inline void widen(uint32_t word, float* x) {
  if constexpr (std::is_same_v<T, float>) {
    x[0] = __uint_as_float(word);
  } else if constexpr (std::is_same_v<T, Bf16>) {
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xffff0000u);
  } else if constexpr (std::is_same_v<T, Fp16>) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
    x[0] = pair.x;
    x[1] = pair.y;
  } else if constexpr (std::is_same_v<T, Fp8>) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto half = static_cast<__nv_fp8x2_storage_t>(word >> (16 * i));
      const float2 pair = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(half, __NV_E4M3)));
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  } else {
    // The bits of the half 1024 + u are 0x6400 | u, with u = value + 128.
    const uint32_t biased = word ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t bits = __byte_perm(biased, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
      const __half2 value =
          __hsub2(*reinterpret_cast<const __half2*>(&bits), __half2half2(__half(1152.0f)));
      const float2 pair = __half22float2(value);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}

// The 32-bit register that holds 4 / sizeof(T) elements. 8-bit values are rounded and saturated.
template <class T>
__device__ inline uint32_t narrow(const float* x) {
  if constexpr (std::is_same_v<T, float>) {
    return __float_as_uint(x[0]);
  } else if constexpr (std::is_same_v<T, Bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[0], x[1]);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else if constexpr (std::is_same_v<T, Fp16>) {
    const __half2 pair = __floats2half2_rn(x[0], x[1]);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else if constexpr (std::is_same_v<T, Fp8>) {
    const uint32_t low =
        __nv_cvt_float2_to_fp8x2(make_float2(x[0], x[1]), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high =
        __nv_cvt_float2_to_fp8x2(make_float2(x[2], x[3]), __NV_SATFINITE, __NV_E4M3);
    return low | (high << 16);
  } else {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int value = max(-127, min(127, __float2int_rn(x[i])));
      word |= static_cast<uint32_t>(value & 255) << (8 * i);
    }
    return word;
  }
}

// The next part of two numbers, packed; they become what is left.
template <class Part>
__device__ inline uint32_t take_part(float (&x)[2]) {
  const uint32_t part = narrow<Part>(x);
  float y[2];
  widen<Part>(part, y);
  x[0] -= y[0];
  x[1] -= y[1];
  return part;
}

// Two numbers as the sum of two pairs of 16-bit ones: of bfloat16, which keeps 16 of their bits.
struct SplitPair {
  uint32_t high, low;
};
__device__ inline SplitPair split_pair(float x, float y) {
  float rest[2] = {x, y};
  const uint32_t high = take_part<Bf16>(rest);
  return {high, narrow<Bf16>(rest)};
}

template <class T, int kElems>
__device__ inline void load_elements(const void* source, float* x) {
  using W = Word<kElems * sizeof(T)>;
  constexpr int kPerRegister = 4 / sizeof(T), kRegisters = sizeof(W) / 4;
  const W word = *static_cast<const W*>(source);
#pragma unroll
  for (int i = 0; i < kRegisters; ++i)
    widen<T>(reinterpret_cast<const uint32_t*>(&word)[i], x + i * kPerRegister);
}

template <class T, int kElems>
__device__ inline void store_elements(void* target, const float* x) {
  using W = Word<kElems * sizeof(T)>;
  constexpr int kPerRegister = 4 / sizeof(T), kRegisters = sizeof(W) / 4;
  W word;
#pragma unroll
  for (int i = 0; i < kRegisters; ++i)
    reinterpret_cast<uint32_t*>(&word)[i] = narrow<T>(x + i * kPerRegister);
  *static_cast<W*>(target) = word;
}

// Lanes that share a row, everywhere.
inline constexpr int kRowLanes = 8;

// Where the kState elements of a row of T lie: lane l of eight holds kChunks runs of kElems
// consecutive elements, those of run c from (c * 8 + l) * kElems on.
template <class T, int kState>
struct RowMap {
  static constexpr int kPerLane = kState / kRowLanes;
  static constexpr int kElems = kPerLane < int(16 / sizeof(T)) ? kPerLane : int(16 / sizeof(T));
  static constexpr int kChunks = kPerLane / kElems;
  __device__ static int element(int chunk, int lane) { return (chunk * kRowLanes + lane) * kElems; }

  // This lane's share of a row in memory.
  __device__ static void load(const T* row, int lane, float (&x)[kPerLane]) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      load_elements<T, kElems>(row + element(c, lane), x + c * kElems);
  }
};

// This lane's share of a padded row of floats (padded_index), as Map lays a row out.
template <class Map, int kPerLane>
__device__ inline void load_padded(const float* row, int lane, float (&x)[kPerLane]) {
  constexpr int kRun = Map::kElems < 4 ? Map::kElems : 4;
#pragma unroll
  for (int c = 0; c < Map::kChunks; ++c)
#pragma unroll
    for (int e = 0; e < Map::kElems; e += kRun)
      load_elements<float, kRun>(row + padded_index(Map::element(c, lane) + e),
                                 x + c * Map::kElems + e);
}

template <class Map, int kPerLane>
__device__ inline void store_padded(float* row, int lane, const float (&x)[kPerLane]) {
  constexpr int kRun = Map::kElems < 4 ? Map::kElems : 4;
#pragma unroll
  for (int c = 0; c < Map::kChunks; ++c)
#pragma unroll
    for (int e = 0; e < Map::kElems; e += kRun)
      store_elements<float, kRun>(row + padded_index(Map::element(c, lane) + e),
                                  x + c * Map::kElems + e);
}

// log(1 + exp(x)) to a few units in the last place: with u = exp(-|x|) <= 1 and z = u / (2 + u) it
// is max(x, 0) + 2 atanh(z), z <= 1/3.
__device__ inline float softplus(float x) {
  const float u = __expf(-fabsf(x)), z = __fdividef(u, 2.0f + u), w = z * z;
  float series = 1.0f / 15;
  series = fmaf(series, w, 1.0f / 13);
  series = fmaf(series, w, 1.0f / 11);
  series = fmaf(series, w, 1.0f / 9);
  series = fmaf(series, w, 1.0f / 7);
  series = fmaf(series, w, 1.0f / 5);
  series = fmaf(series, w, 1.0f / 3);
  series = fmaf(series, w, 1.0f);
  return fmaf(2.0f * z, series, fmaxf(x, 0.0f));
}

}  // namespace replayssm::cuda
