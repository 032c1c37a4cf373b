// Everything of a forward pass on CUDA devices besides matrix products, attention (attention.h),
// experts (experts.h) and the recurrence: element-wise ops and norms over rows. What the CPU's ops
// do (ops/cpu/dense.h), fused where that saves a launch.
//
// Everything behind a pointer is device memory. Calls are only enqueued: they neither allocate nor
// synchronise and are valid in captured graphs whatever index arrays hold when they are replayed.
// Types are float32, float16 or bfloat16; arithmetic is fp32; results are rounded once, to nearest
// even. Strides are in elements. Norm weights, tables and frequencies are read before the kernel
// enqueued just before has ended: it must not write them. Any alignment and size is accepted; rows
// that start at multiples of 16 bytes and are multiples of 8 long are faster.
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/types.h"

namespace replayssm::cuda {

// Rows of values in memory: row r starts at data + r * stride.
struct InRows {
  const void* data = nullptr;
  int64_t stride = 0;
  DType dtype = DType::kFloat32;
};
struct OutRows {
  void* data = nullptr;
  int64_t stride = 0;
  DType dtype = DType::kFloat32;
};

// Largest dim of rms_norm.
inline constexpr int64_t kMaxNormDim = 16384;

// out[r] = table[ids[r]] * scale; 0 where ids[r] is negative. table: [vocab, dim]. An id of -2 - i
// stands for drawn[i] where `drawn` is given.
void embed(const InRows& table, const int32_t* ids, const int32_t* drawn, int64_t rows, int64_t dim,
           float scale, const OutRows& out, cudaStream_t stream);

// Largest delta_parts that add_rms_norm adds without going back for each.
inline constexpr int64_t kMostQuickParts = 4;

// The residual stream and the norm behind it:
//
//   h[r] = hidden[r] + scale delta[r] + second_scale second[r]        y[r] = norm(h[r]) weight
//
// norm(h) = h / sqrt(mean(h^2) + eps). delta may be the sum of several parts. Without `row_index`,
// h replaces hidden wherever something is added. With it, row_index[r] takes r's place on the right
// (negative: y[r] = 0) and hidden stays.
struct AddNormParams {
  OutRows hidden{};                    // [rows, dim]
  InRows delta{};                      // data may be null: nothing is added
  int64_t delta_parts = 1;             // delta_part_stride apart
  int64_t delta_part_stride = 0;       //
  InRows second{};                     // the same
  float scale = 1;                     // of delta
  float second_scale = 1;              // of second
  const float* weight = nullptr;       // [dim]; null: h is written to y as it is
  float eps = 0;                       //
  const int32_t* row_index = nullptr;  // [rows]; may be null
  int64_t rows = 0;
  int64_t dim = 0;
  OutRows y{};       // data may be null: hidden is all that is wanted
  OutRows y_wide{};  // the same again in another type (for routers); data may be null
};
void add_rms_norm(const AddNormParams& params, cudaStream_t stream);

// y = silu(scale gate) up. gate_up: [rows, 2 * dim], gate first.
void swiglu(const InRows& gate_up, float scale, int64_t rows, int64_t dim, const OutRows& y,
            cudaStream_t stream);

// y = relu(scale x)^2.
void relu_squared(const InRows& x, float scale, int64_t rows, int64_t dim, const OutRows& y,
                  cudaStream_t stream);

// y = x sigmoid(gate).
void sigmoid_gate(const InRows& x, const InRows& gate, int64_t rows, int64_t dim, const OutRows& y,
                  cudaStream_t stream);

// y += scale x.
void add_scaled(const InRows& x, float scale, int64_t rows, int64_t dim, const OutRows& y,
                cudaStream_t stream);

// x[r, i] *= scale[i], in place. scale: [dim].
void scale_columns(const OutRows& x, const float* scale, int64_t rows, int64_t dim,
                   cudaStream_t stream);

// y = x in y's type. x and y: [rows, heads, dim], heads x_head_stride and y_head_stride apart.
void convert_heads(const InRows& x, int64_t x_head_stride, int64_t rows, int64_t heads, int64_t dim,
                   const OutRows& y, int64_t y_head_stride, cudaStream_t stream);
inline void convert_rows(const InRows& x, int64_t rows, int64_t dim, const OutRows& y,
                         cudaStream_t stream) {
  convert_heads(x, dim, rows, 1, dim, y, dim, stream);
}

}  // namespace replayssm::cuda
