// Attention over float32 caches, on the ordinary cores. A block takes sixteen queries at a time
// through its keys; a thread has whole columns of their output.

#include "ops/cuda/attention_instances.h"
#include "ops/cuda/attention_launch.cuh"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 128, kQueries = 16, kKeys = 32, kWeightStride = kKeys + 1;
constexpr int kLanes = kThreads / kQueries;  // of a row's weights

// Floats of shared memory.
struct SingleLayout {
  int stride, queries, keys, values, weights, rows, total;
};
__host__ __device__ inline SingleLayout single_layout(int dim, bool shared) {
  SingleLayout s;
  s.stride = dim + 1;
  s.queries = 0;
  s.keys = kQueries * s.stride;
  s.values = s.keys + (shared ? 0 : kKeys * s.stride);
  s.weights = s.values + kKeys * s.stride;
  s.rows = s.weights + kQueries * kWeightStride;  // maxima, sums and what shrinks them
  s.total = s.rows + 3 * kQueries;
  return s;
}

__device__ inline const float* floats(const void* data) { return static_cast<const float*>(data); }

__device__ inline void fetch_rows(const AttentionCall& call, const AttentionWork& work, int key0,
                                  const SingleLayout& layout, float* shared) {
  const int dim = layout.stride - 1, lane = static_cast<int>(threadIdx.x) % 32;
  for (int r = static_cast<int>(threadIdx.x) / 32; r < kKeys; r += kThreads / 32) {
    const bool exists = key0 + r < work.key_end;
    const int64_t at =
        exists ? cache_row(call, work, cache_block(call, work, key0 + r), key0 + r) : 0;
    for (int i = lane; i < dim; i += 32) {
      shared[layout.keys + r * layout.stride + i] = exists ? floats(call.p.cache.k)[at + i] : 0.0f;
      if (layout.values != layout.keys)
        shared[layout.values + r * layout.stride + i] =
            exists ? floats(call.p.cache.v)[at + i] : 0.0f;
    }
  }
}

// Scores of four keys per thread.
__device__ inline void score_keys(const AttentionCall& call, const AttentionWork& work, int first,
                                  int key0, const SingleLayout& layout, float* shared) {
  constexpr int kEach = kKeys / kLanes;
  const int r = static_cast<int>(threadIdx.x) % kQueries,
            k0 = static_cast<int>(threadIdx.x) / kQueries * kEach;
  const float* query = shared + layout.queries + r * layout.stride;
  const float* key = shared + layout.keys + k0 * layout.stride;
  float sum[kEach] = {};
  for (int i = 0; i < layout.stride - 1; ++i)
#pragma unroll
    for (int k = 0; k < kEach; ++k) sum[k] = fmaf(query[i], key[k * layout.stride + i], sum[k]);
  const int last = min(work.last_key(call, first + r), work.key_end - 1);
  const uint64_t ancestors =
      call.p.batch.ancestors && first + r < work.rows ? work.ancestors(call, first + r) : 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    shared[layout.weights + r * kWeightStride + k0 + k] =
        key0 + k0 + k <= last && work.sees(ancestors, key0 + k0 + k)
            ? sum[k] * call.p.scale * 1.44269504f
            : -INFINITY;
}

__device__ inline void weigh_keys(const SingleLayout& layout, float* shared) {
  const int r = static_cast<int>(threadIdx.x) / kLanes,
            lane = static_cast<int>(threadIdx.x) % kLanes;
  float* weight = shared + layout.weights + r * kWeightStride;
  float* state = shared + layout.rows + r;
  float now = state[0];
  for (int k = lane; k < kKeys; k += kLanes) now = fmaxf(now, weight[k]);
  now = row_max(now);
  const float base = now == -INFINITY ? 0.0f : now;
  float sum = 0;
  for (int k = lane; k < kKeys; k += kLanes) {
    weight[k] = exp2f(weight[k] - base);
    sum += weight[k];
  }
  sum = row_sum(sum);
  if (lane > 0) return;
  const float shrink = exp2f(state[0] - base);
  state[0] = now;
  state[kQueries] = fmaf(state[kQueries], shrink, sum);
  state[2 * kQueries] = shrink;
}

template <int kColumns>
__device__ inline void add_values(const SingleLayout& layout, const float* shared,
                                  float (&out)[kQueries][kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int column = c * kThreads + static_cast<int>(threadIdx.x);
    if (column >= layout.stride - 1) continue;
#pragma unroll
    for (int r = 0; r < kQueries; ++r) out[r][c] *= shared[layout.rows + 2 * kQueries + r];
    for (int k = 0; k < kKeys; ++k) {
      const float value = shared[layout.values + k * layout.stride + column];
#pragma unroll
      for (int r = 0; r < kQueries; ++r)
        out[r][c] = fmaf(shared[layout.weights + r * kWeightStride + k], value, out[r][c]);
    }
  }
}

template <int kColumns>
__device__ inline void store_rows(const AttentionCall& call, const AttentionWork& work, int first,
                                  const SingleLayout& layout, const float* shared,
                                  const float (&out)[kQueries][kColumns]) {
#pragma unroll
  for (int r = 0; r < kQueries; ++r) {
    const int row = first + r, dim = layout.stride - 1;
    if (row >= work.rows) continue;
    const float most = shared[layout.rows + r], sum = shared[layout.rows + kQueries + r];
    const bool whole = work.splits == 1;
    const int64_t part =
        whole ? 0 : partial_row(call, work.sequence, work.kv_head(), work.split, row);
    if (!whole && threadIdx.x == 0) call.partial_sum[part] = make_float2(most, sum);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = c * kThreads + static_cast<int>(threadIdx.x);
      if (column >= dim) continue;
      float x[1] = {whole ? out[r][c] / sum : out[r][c]};
      if (whole) {
        store_output(call, work, row, column, x);
      } else {
        call.partial[part * dim + column] = x[0];
      }
    }
  }
}

template <int kColumns>
__device__ void attend(const AttentionCall& call, const AttentionWork& work, int first,
                       const SingleLayout& layout, float* shared) {
  const int dim = layout.stride - 1;
  for (int i = static_cast<int>(threadIdx.x); i < kQueries * dim; i += kThreads) {
    const int r = i / dim, column = i % dim;
    const bool exists = first + r < work.rows;
    shared[layout.queries + r * layout.stride + column] =
        exists ? floats(call.p.q.data)[work.offset(call, first + r, call.p.q.stride, dim) + column]
               : 0.0f;
  }
  if (threadIdx.x < kQueries) {
    shared[layout.rows + threadIdx.x] = -INFINITY;
    shared[layout.rows + kQueries + threadIdx.x] = 0;
  }
  float out[kQueries][kColumns] = {};
  for (int key0 = work.key_begin; key0 < work.key_end; key0 += kKeys) {
    fetch_rows(call, work, key0, layout, shared);
    __syncthreads();
    score_keys(call, work, first, key0, layout, shared);
    __syncthreads();
    weigh_keys(layout, shared);
    __syncthreads();
    add_values(layout, shared, out);
    __syncthreads();
  }
  store_rows(call, work, first, layout, shared, out);
  __syncthreads();
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads)
    paged_attention_single_kernel(const __grid_constant__ AttentionCall call) {
  release_successor();
  extern __shared__ float shared[];
  const SingleLayout layout =
      single_layout(static_cast<int>(call.p.cache.head_dim), call.p.cache.k == call.p.cache.v);
  const int pieces = call.plan->count * static_cast<int>(call.p.cache.kv_heads);
  wait_for_predecessor();
  for (int i = static_cast<int>(blockIdx.x); i < pieces; i += static_cast<int>(gridDim.x)) {
    const AttentionWork work = load_work(call, i);
    for (int first = 0; first < work.rows; first += kQueries)
      attend<kColumns>(call, work, first, layout, shared);
  }
}

}  // namespace

void launch_attention_single(const AttentionCall& call, cudaStream_t stream) {
  const auto dim = static_cast<int>(call.p.cache.head_dim);
  const int bytes = single_layout(dim, call.p.cache.k == call.p.cache.v).total * 4;
  const auto launch = [&](auto kernel) {
    launch_attention_kernel(kernel, kThreads, bytes, call, stream);
  };
  if (dim <= kThreads) return launch(paged_attention_single_kernel<1>);
  if (dim <= 2 * kThreads) return launch(paged_attention_single_kernel<2>);
  launch(paged_attention_single_kernel<5>);
}

}  // namespace replayssm::cuda
