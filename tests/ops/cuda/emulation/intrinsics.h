// What kernels use of CUDA's language, for the host's compiler.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "block.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
#define threadIdx replayssm::emulation::thread_index
#define blockIdx replayssm::emulation::block_index
#define blockDim replayssm::emulation::block_size
#define gridDim replayssm::emulation::grid_size
#define __syncthreads() replayssm::emulation::meet_block()
#define __syncwarp() replayssm::emulation::meet_warp()

using std::max;
using std::min;

template <class T>
T __shfl_xor_sync(unsigned, T x, unsigned distance) {
  return replayssm::emulation::exchange(x, threadIdx.x ^ distance);
}
template <class T>
T __shfl_down_sync(unsigned, T x, unsigned distance) {
  const unsigned lane = threadIdx.x % 32, from = lane + distance;
  return replayssm::emulation::exchange(x, from < 32 ? from : lane);
}
template <class T>
T __shfl_up_sync(unsigned, T x, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return replayssm::emulation::exchange(x, lane >= distance ? lane - distance : lane);
}
template <class T>
T __shfl_sync(unsigned, T x, unsigned from, unsigned width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return replayssm::emulation::exchange(x, lane / width * width + from % width);
}

inline int __all_sync(unsigned mask, int holds) {
  holds = holds != 0 ? 1 : 0;
  for (unsigned d = 16; d > 0; d /= 2) holds &= __shfl_xor_sync(mask, holds, d);
  return holds;
}

template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}

template <class T>
void __stcs(T* to, T value) {
  *to = value;
}

inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i)
    word |= static_cast<uint32_t>(bytes >> (selector >> (4 * i) & 7) * 8 & 255) << (8 * i);
  return word;
}
