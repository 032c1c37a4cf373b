// Everything of a forward pass on the CPU besides matrix products and the recurrence. SIMD with
// run-time dispatch; rows are spread over the pool. fp32 in and out, except where a `void*` with a
// dtype says that a result feeds a matrix product or a cache (rounded to nearest even).
#pragma once

#include <cstdint>

#include "core/thread_pool.h"
#include "ops/layer_params.h"

namespace replayssm::cpu {

// y[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. x, y: [rows, dim], contiguous; y in `dtype`.
void rms_norm(const float* x, const float* weight, int64_t rows, int64_t dim, float eps, void* y,
              DType dtype, ThreadPool& pool);

// In place over the last dimension of x: [rows, heads, dim], tokens row_stride apart.
void head_rms_norm(float* x, int64_t row_stride, const float* weight, int64_t rows, int64_t heads,
                   int64_t dim, float eps, ThreadPool& pool);

void gated_rms_norm(const GatedNormParams& params, ThreadPool& pool);

// y = silu(gate) * up. gate_up: [rows, 2 * dim], gate first; y: [rows, dim] in `dtype`.
void swiglu(const float* gate_up, int64_t rows, int64_t dim, void* y, DType dtype,
            ThreadPool& pool);

// y = relu(x)^2. x: [rows, dim], y: the same in `dtype`.
void relu_squared(const float* x, int64_t rows, int64_t dim, void* y, DType dtype,
                  ThreadPool& pool);

// y += scale * x over `count` values.
void add_scaled(const float* x, float scale, int64_t count, float* y, ThreadPool& pool);

// x[r, i] *= scale[i]. x: [rows, dim], rows row_stride apart; scale: [dim].
void scale_columns(float* x, int64_t row_stride, const float* scale, int64_t rows, int64_t dim,
                   ThreadPool& pool);

// out[r] = table[ids[r]] * scale. table: [vocab, dim] in `dtype`; out: [rows, dim].
void embed(const void* table, DType dtype, const int32_t* ids, int64_t rows, int64_t dim,
           float scale, float* out, ThreadPool& pool);

// x converted to `dtype`. rows x_stride apart; y: [rows, dim] contiguous.
void convert_rows(const float* x, int64_t x_stride, int64_t rows, int64_t dim, void* y, DType dtype,
                  ThreadPool& pool);

// Rotary embedding in the half-split (NeoX) form on the first `rotary_dim` of `dim` values of every
// head, in place. x: [rows, heads, dim], rows row_stride apart; position: [rows];
// inverse_frequency: [rotary_dim / 2]. Angles are fp32 products, as in published implementations.
void rotary(float* x, int64_t row_stride, const int64_t* position, const float* inverse_frequency,
            int64_t rows, int64_t heads, int64_t dim, int64_t rotary_dim, ThreadPool& pool);

// Stores the new tokens' keys and values. k, v: [tokens, kv_heads, head_dim], rows kv_stride apart.
void store_kv(const KvCache& cache, const KvBatch& batch, const float* k, const float* v,
              int64_t kv_stride, ThreadPool& pool);

// Causal attention of the new tokens over cache and window (already stored):
// out = softmax(scale q K^T) V. q: [tokens, heads, head_dim], tokens q_stride apart;
// out: [tokens, heads, head_dim] contiguous. `heads` is a multiple of kv_heads.
void paged_attention(const KvCache& cache, const KvBatch& batch, const float* q, int64_t q_stride,
                     int64_t heads, float scale, float* out, ThreadPool& pool);

// Moves the cached tokens of accepted paths of tree windows together, ascending and in place: the
// token at row path[query_start[s] + i] of the window becomes row i for i < accepted[s].
void compact_kv(const KvCache& cache, const KvBatch& batch, const int32_t* path,
                const int32_t* accepted, ThreadPool& pool);

// y = x * sigmoid(gate). x: [rows, dim]; gate: rows gate_stride apart; y: [rows, dim] in `dtype`.
void sigmoid_gate(const float* x, const float* gate, int64_t gate_stride, int64_t rows, int64_t dim,
                  void* y, DType dtype, ThreadPool& pool);

// Chooses the experts of every token and their weights. Ties go to the lower index.
void route_experts(const RouterParams& params, ThreadPool& pool);

}  // namespace replayssm::cpu
