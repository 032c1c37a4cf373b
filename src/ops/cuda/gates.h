// Write strengths and log decays from raw projections, on CUDA devices. Everything behind a pointer
// is device memory; dt_bias and a are read before the kernel enqueued just before has ended: it
// must not write them.
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/types.h"

namespace replayssm::cuda {

// Mamba-2: b = clamp(softplus(dt + dt_bias), dt_min, dt_max), g = b * a with a = -exp(A_log).
struct Mamba2GateParams {
  const void* dt = nullptr;        // [tokens, heads]
  DType dtype = DType::kFloat32;   // of dt: float32, float16 or bfloat16
  int64_t dt_stride = 0;           // from token to token
  const float* dt_bias = nullptr;  // [heads]
  const float* a = nullptr;        // [heads]
  float dt_min = 0;
  float dt_max = 0;
  int64_t tokens = 0;
  int64_t heads = 0;
  float* b = nullptr;  // [tokens, heads]
  float* g = nullptr;  // [tokens, heads]
};
void mamba2_gates(const Mamba2GateParams& params, cudaStream_t stream);

// Gated Delta: b = sigmoid(beta), g = a * softplus(alpha + dt_bias) with a = -exp(A_log). Without
// alpha (Kimi Delta) b only.
struct DeltaGateParams {
  const void* beta = nullptr;      // [tokens, heads]
  const void* alpha = nullptr;     // [tokens, heads], may be null
  DType dtype = DType::kFloat32;   // of beta and alpha: float32, float16 or bfloat16
  int64_t stride = 0;              // from token to token, of both
  const float* dt_bias = nullptr;  // [heads]
  const float* a = nullptr;        // [heads]
  int64_t tokens = 0;
  int64_t heads = 0;
  float* b = nullptr;  // [tokens, heads]
  float* g = nullptr;  // [tokens, heads]
};
void delta_gates(const DeltaGateParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
