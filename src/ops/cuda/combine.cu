// The weighted sum of a row's experts: a thread has a run of its elements.

#include "core/check.h"
#include "ops/cuda/activations.cuh"
#include "ops/cuda/check_rows.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/experts.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 256, kVec = 8;

template <int kCount>
__global__ void __launch_bounds__(kThreads)
    combine_experts_kernel(const __grid_constant__ CombineParams p, uint32_t count, uint32_t runs) {
  release_successor();
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t row = i / runs, column = int64_t{i - static_cast<uint32_t>(row) * runs} * kCount;
  wait_for_predecessor();
  float sum[kCount] = {}, x[kCount];
  if (!p.live_rows || row < *p.live_rows) {
    if (p.x.data) {
#pragma unroll 4
      for (int64_t k = 0; k < p.top_k; ++k) {
        const int64_t pair = row * p.top_k + k;
        load_run<kCount>(p.x.data, p.x.dtype, pair * p.x.stride + column, x);
        const float weight = p.weight[pair];
#pragma unroll
        for (int e = 0; e < kCount; ++e) sum[e] = fmaf(weight, x[e], sum[e]);
      }
    }
    if (p.shared.data) {
      float factor = 1;
      if (p.shared_gate.data) {
        load_run<1>(p.shared_gate.data, p.shared_gate.dtype, row * p.shared_gate.stride, &factor);
        factor = sigmoid(factor);
      }
      load_run<kCount>(p.shared.data, p.shared.dtype, row * p.shared.stride + column, x);
#pragma unroll
      for (int e = 0; e < kCount; ++e) sum[e] = fmaf(factor, x[e], sum[e]);
    }
  }
  store_run<kCount>(p.y.data, p.y.dtype, row * p.y.stride + column, sum);
}

void check(const CombineParams& p) {
  check_count("rows", p.rows, 0);
  check_count("dim", p.dim, 1);
  if (p.x.data) {
    if (p.top_k < 1 || p.top_k > kMaxTopK)
      fail("top_k: expected 1 to ", kMaxTopK, ", got ", p.top_k);
    check_rows("x", p.x, p.rows * p.top_k, p.dim);
    check_pointer("weight", p.weight, sizeof(float));
  }
  if (p.shared.data) check_rows("shared", p.shared, p.rows, p.dim);
  if (p.shared_gate.data) check_rows("shared_gate", p.shared_gate, p.rows, 1);
  check_rows("y", p.y, p.rows, p.dim);
}

}  // namespace

void combine_experts(const CombineParams& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  check(p);
  const bool vectors =
      p.dim % kVec == 0 && rows_aligned(p.x) && rows_aligned(p.shared) && rows_aligned(p.y);
  const int64_t runs = vectors ? p.dim / kVec : p.dim, count = p.rows * runs;
  if (count > INT32_MAX) fail("rows: expected fewer, got ", p.rows, " of ", p.dim, " elements");
  const auto start = [&](auto kernel) {
    launch_dependent("combine_experts", kernel, dim3(blocks_for(count, kThreads)), kThreads, 0,
                     stream, p, static_cast<uint32_t>(count), static_cast<uint32_t>(runs));
  };
  if (vectors) return start(combine_experts_kernel<kVec>);
  start(combine_experts_kernel<1>);
}

}  // namespace replayssm::cuda
