// Rows of activations whose type is known at run time only, and the functions applied to them.
#pragma once

#include "ops/cuda/elements.cuh"

namespace replayssm::cuda {

// kCount consecutive elements: one, aligned to itself, or a multiple of 4, aligned to 16 bytes or
// to all of them, whichever is less.
template <class T, int kCount>
__device__ inline void load_run(const T* from, float* x) {
  if constexpr (kCount == 1) {
    x[0] = to_float(*from);
  } else {
    constexpr int kMost = 16 / sizeof(T), kElems = kCount < kMost ? kCount : kMost;
#pragma unroll
    for (int i = 0; i < kCount; i += kElems) load_elements<T, kElems>(from + i, x + i);
  }
}
template <class T, int kCount>
__device__ inline void store_run(T* to, const float* x) {
  if constexpr (kCount == 1) {
    *to = from_float<T>(x[0]);
  } else {
    constexpr int kMost = 16 / sizeof(T), kElems = kCount < kMost ? kCount : kMost;
#pragma unroll
    for (int i = 0; i < kCount; i += kElems) store_elements<T, kElems>(to + i, x + i);
  }
}

// The same at `index` of an array of `dtype`, which is float32, float16 or bfloat16.
template <int kCount>
__device__ inline void load_run(const void* data, DType dtype, int64_t index, float* x) {
  switch (dtype) {
    case DType::kBFloat16: return load_run<Bf16, kCount>(static_cast<const Bf16*>(data) + index, x);
    case DType::kFloat16: return load_run<Fp16, kCount>(static_cast<const Fp16*>(data) + index, x);
    default: return load_run<float, kCount>(static_cast<const float*>(data) + index, x);
  }
}
template <int kCount>
__device__ inline void store_run(void* data, DType dtype, int64_t index, const float* x) {
  switch (dtype) {
    case DType::kBFloat16: return store_run<Bf16, kCount>(static_cast<Bf16*>(data) + index, x);
    case DType::kFloat16: return store_run<Fp16, kCount>(static_cast<Fp16*>(data) + index, x);
    default: return store_run<float, kCount>(static_cast<float*>(data) + index, x);
  }
}

// Two elements from an even index on, of an array aligned to two.
__device__ inline void store_pair(void* data, DType dtype, int64_t index, const float* x) {
  switch (dtype) {
    case DType::kBFloat16: return store_elements<Bf16, 2>(static_cast<Bf16*>(data) + index, x);
    case DType::kFloat16: return store_elements<Fp16, 2>(static_cast<Fp16*>(data) + index, x);
    default: return store_elements<float, 2>(static_cast<float*>(data) + index, x);
  }
}

// kCount consecutive floats that no kernel of the stream writes.
template <int kCount>
__device__ inline void load_constants(const float* from, float* x) {
  if constexpr (kCount == 1) {
    x[0] = __ldg(from);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(from + i));
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  }
}

__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }
__device__ inline float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }

}  // namespace replayssm::cuda
