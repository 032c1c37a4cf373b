// The residual stream and its norms: a block has a row, whose values stay in registers between the
// sum of squares and the scaling. Weights are read while the kernel before still runs.

#include "core/check.h"
#include "ops/cuda/activations.cuh"
#include "ops/cuda/block_reduce.cuh"
#include "ops/cuda/check_rows.h"
#include "ops/cuda/dense.h"
#include "ops/cuda/dependent_launch.cuh"

namespace replayssm::cuda {
namespace {

constexpr int kMaxThreads = 1024, kVec = 8;

// x += scale rows[row]
template <int kCount>
__device__ inline void add_run(const InRows& rows, float scale, int64_t row, int64_t column,
                               float (&x)[kCount]) {
  float value[kCount];
  load_run<kCount>(rows.data, rows.dtype, row * rows.stride + column, value);
#pragma unroll
  for (int e = 0; e < kCount; ++e) x[e] = fmaf(value[e], scale, x[e]);
}

// The same with the sum of delta's parts, always in their order.
template <int kCount>
__device__ inline void add_delta(const AddNormParams& p, int64_t row, int64_t column,
                                 float (&x)[kCount]) {
  if (p.delta_parts == 1) return add_run(p.delta, p.scale, row, column, x);
  float sum[kCount] = {};
#pragma unroll(kCount > 1 ? 4 : 1)
  for (int64_t part = 0; part < p.delta_parts; ++part)
    add_run(p.delta, 1, row, part * p.delta_part_stride + column, sum);
#pragma unroll
  for (int e = 0; e < kCount; ++e) x[e] = fmaf(sum[e], p.scale, x[e]);
}

// A thread has kChunks runs of kCount consecutive elements, those of the block side by side.
template <int kCount, int kChunks>
__global__ void __launch_bounds__(kMaxThreads)
    add_rms_norm_kernel(const __grid_constant__ AddNormParams p) {
  release_successor();
  __shared__ float shared[kMaxThreads / 32];
  const int64_t row = blockIdx.x;
  const auto at = [](int c) { return int64_t{c * blockDim.x + threadIdx.x} * kCount; };
  const auto active = [&](int c) { return at(c) < p.dim; };
  constexpr int kEarly = kCount > 1 ? kChunks : 0;  // single elements would take the registers
  float x[kChunks][kCount], weight[kChunks][kCount];
#pragma unroll
  for (int c = 0; c < kEarly; ++c)
    if (p.weight && active(c)) load_constants<kCount>(p.weight + at(c), weight[c]);
  wait_for_predecessor();
  const int64_t source = p.row_index ? p.row_index[row] : row;
  const bool added = p.delta.data || p.second.data;
  float sum = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (!active(c)) continue;
#pragma unroll
    for (float& value : x[c]) value = 0;
    if (source < 0) continue;
    load_run<kCount>(p.hidden.data, p.hidden.dtype, source * p.hidden.stride + at(c), x[c]);
    if (p.delta.data) add_delta(p, source, at(c), x[c]);
    if (p.second.data) add_run(p.second, p.second_scale, source, at(c), x[c]);
    if (added && !p.row_index)
      store_run<kCount>(p.hidden.data, p.hidden.dtype, row * p.hidden.stride + at(c), x[c]);
#pragma unroll
    for (const float value : x[c]) sum = fmaf(value, value, sum);
  }
  if (!p.y.data && !p.y_wide.data) return;
  float scale = 1;
  if (p.weight) {
    const float mean = __fdividef(block_sum(sum, shared), static_cast<float>(p.dim));
    scale = source < 0 ? 0.0f : rsqrtf(mean + p.eps);
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (!active(c)) continue;
    if (p.weight) {
      if (c >= kEarly) load_constants<kCount>(p.weight + at(c), weight[c]);
#pragma unroll
      for (int e = 0; e < kCount; ++e) x[c][e] *= scale * weight[c][e];
    }
    for (const OutRows& y : {p.y, p.y_wide})
      if (y.data) store_run<kCount>(y.data, y.dtype, row * y.stride + at(c), x[c]);
  }
}

// What lies between most layers: floats, rows of up to kVec elements a thread, one delta of kParts
// parts. No branch stands between a row's loads, all of which are on their way at once; one block a
// multiprocessor is promised so that the compiler gives them the registers.
template <class Y, int kParts>
__global__ void __launch_bounds__(kMaxThreads, 1)
    residual_norm_kernel(const __grid_constant__ AddNormParams p) {
  release_successor();
  __shared__ float shared[kMaxThreads / 32];
  const int64_t row = blockIdx.x, column = int64_t{threadIdx.x} * kVec;
  const bool active = column < p.dim;
  float* const hidden = static_cast<float*>(p.hidden.data) + row * p.hidden.stride + column;
  const float* const delta =
      static_cast<const float*>(p.delta.data) + row * p.delta.stride + column;
  float x[kVec], part[kParts][kVec], weight[kVec], sum = 0;
  // Not as constants, which the compiler would load behind the wait.
  if (active) load_run<float, kVec>(p.weight + column, weight);
  wait_for_predecessor();
  if (active) {
    load_run<float, kVec>(hidden, x);
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      load_run<float, kVec>(delta + i * p.delta_part_stride, part[i]);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      float added = part[0][e];
#pragma unroll
      for (int i = 1; i < kParts; ++i) added += part[i][e];
      x[e] = fmaf(added, p.scale, x[e]);
    }
    store_run<float, kVec>(hidden, x);
#pragma unroll
    for (const float value : x) sum = fmaf(value, value, sum);
  }
  const float mean = __fdividef(block_sum(sum, shared), static_cast<float>(p.dim));
  const float scale = rsqrtf(mean + p.eps);
  if (!active) return;
#pragma unroll
  for (int e = 0; e < kVec; ++e) x[e] *= scale * weight[e];
  store_run<Y, kVec>(static_cast<Y*>(p.y.data) + row * p.y.stride + column, x);
}

template <class Y>
void launch_residual_norm(const AddNormParams& p, cudaStream_t stream) {
  void (*const kernels[kMostQuickParts])(AddNormParams) = {
      residual_norm_kernel<Y, 1>, residual_norm_kernel<Y, 2>, residual_norm_kernel<Y, 3>,
      residual_norm_kernel<Y, 4>};
  const int64_t threads = (p.dim + kVec - 1) / kVec;
  launch_dependent("add_rms_norm", kernels[p.delta_parts - 1], dim3(blocks_for(p.rows, 1)),
                   static_cast<int>((threads + 31) / 32 * 32), 0, stream, p);
}

// Returns whether it is one; its rows are aligned.
bool residual_norm(const AddNormParams& p, cudaStream_t stream) {
  const bool floats = p.hidden.dtype == DType::kFloat32 && p.delta.dtype == DType::kFloat32;
  if (!floats || !p.delta.data || p.delta_parts > kMostQuickParts || p.second.data || !p.weight ||
      p.row_index || !p.y.data || p.y_wide.data || p.dim > kVec * kMaxThreads)
    return false;
  switch (p.y.dtype) {
    case DType::kBFloat16: return launch_residual_norm<Bf16>(p, stream), true;
    case DType::kFloat16: return launch_residual_norm<Fp16>(p, stream), true;
    default: return false;
  }
}

template <int kCount, int kChunks>
void launch(const AddNormParams& p, cudaStream_t stream) {
  const int64_t per_thread = int64_t{kCount} * kChunks,
                threads = (p.dim + per_thread - 1) / per_thread;
  launch_dependent("add_rms_norm", add_rms_norm_kernel<kCount, kChunks>,
                   dim3(blocks_for(p.rows, 1)), static_cast<int>((threads + 31) / 32 * 32), 0,
                   stream, p);
}

void check(const AddNormParams& p) {
  check_count("rows", p.rows, 0);
  if (p.dim < 1 || p.dim > kMaxNormDim) fail("dim: expected 1 to ", kMaxNormDim, ", got ", p.dim);
  check_rows("hidden", p.hidden, p.rows, p.dim);
  if (p.delta.data) check_rows("delta", p.delta, p.rows, p.dim);
  check_count("delta_parts", p.delta_parts, 1);
  if (p.second.data) check_rows("second", p.second, p.rows, p.dim);
  if (p.y.data) check_rows("y", p.y, p.rows, p.dim);
  if (p.y_wide.data) check_rows("y_wide", p.y_wide, p.rows, p.dim);
  if (p.weight) check_pointer("weight", p.weight, sizeof(float));
}

}  // namespace

void add_rms_norm(const AddNormParams& p, cudaStream_t stream) {
  check(p);
  if (p.rows == 0) return;
  const bool vectors = p.dim % kVec == 0 && rows_aligned(p.hidden) && rows_aligned(p.delta) &&
                       p.delta_part_stride % kVec == 0 && rows_aligned(p.second) &&
                       rows_aligned(p.weight) && rows_aligned(p.y) && rows_aligned(p.y_wide);
  if (!vectors) return launch<1, kMaxNormDim / kMaxThreads>(p, stream);
  if (residual_norm(p, stream)) return;
  if (p.dim <= kVec * kMaxThreads) return launch<kVec, 1>(p, stream);
  launch<kVec, kMaxNormDim / kVec / kMaxThreads>(p, stream);
}

}  // namespace replayssm::cuda
