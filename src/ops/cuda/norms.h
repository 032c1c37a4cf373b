// The gated normalisation behind a recurrent layer, over groups of consecutive channels, on CUDA
// devices.
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/ops.h"

namespace replayssm::cuda {

// Largest group_dim.
inline constexpr int64_t kMaxGroupDim = 8192;

// y = norm(x act(gate)) weight where gate_first is set, else (norm(x) weight) act(gate), with
// norm(x) = x / sqrt(mean(x^2) + eps). Without a weight nothing is normalised: y = x act(gate).
//
// A zero of x stays one, whatever its gate. Types are float32, float16 or bfloat16. weight and the
// bounds of rows are read before the kernel enqueued just before has ended: it must not write them.
struct GatedNormParams {
  const void* x = nullptr;     // [rows, groups * group_dim]
  const void* gate = nullptr;  // the same shape, rows gate_stride apart
  int64_t gate_stride = 0;
  const float* weight = nullptr;  // [groups * group_dim], or [group_dim] if weight_per_group
  int64_t rows = 0;
  int64_t groups = 0;
  int64_t group_dim = 0;
  bool weight_per_group = false;  // the groups share it
  bool gate_first = false;
  GateActivation activation = GateActivation::kSilu;
  float eps = 0;
  // Only the rows [*first_row, *end_row) are read and written; null: all.
  const int32_t *first_row = nullptr, *end_row = nullptr;
  void* y = nullptr;  // [rows, groups * group_dim]
  DType x_dtype = DType::kFloat32;
  DType gate_dtype = DType::kFloat32;
  DType y_dtype = DType::kFloat32;
};
void gated_rms_norm(const GatedNormParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
