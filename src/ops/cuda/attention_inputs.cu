// Queries, keys and values on their way into attention: a block has a few heads of one token, a
// warp one of them. The sines of the token are computed once per block.

#include "core/check.h"
#include "ops/cuda/activations.cuh"
#include "ops/cuda/attention.h"
#include "ops/cuda/block_reduce.cuh"
#include "ops/cuda/check_rows.h"
#include "ops/cuda/dependent_launch.cuh"

namespace replayssm::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32, kMaxHeadDim = 1024;

// Where a token stands: its sequence, or that none has it.
struct TokenPlace {
  int64_t sequence, position;
  bool exists;
};
__device__ inline TokenPlace find_token(const KvBatch& batch, int64_t token) {
  // The sequences that end at or before it are those before its own.
  int64_t sequence = 0;
  for (int64_t first = 0; first < batch.sequences; first += kThreads) {
    const int64_t s = first + threadIdx.x;
    sequence += __syncthreads_count(s < batch.sequences && batch.query_start[s + 1] <= token);
  }
  if (sequence >= batch.sequences) return {0, 0, false};
  const int64_t begin = batch.query_start[sequence];
  return {sequence, batch.position[sequence] + token - begin, token >= begin};
}

// A warp's head, in fp32 in shared memory, with its norm.
template <int kCount>
__device__ inline void load_head(const InRows& rows, int64_t index, int64_t dim,
                                 const float* weight, int64_t norm_dim, float eps, float* x) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sum = 0;
  for (int64_t i = lane * kCount; i < dim; i += 32 * kCount) {
    float run[kCount];
    load_run<kCount>(rows.data, rows.dtype, index + i, run);
#pragma unroll
    for (int e = 0; e < kCount; ++e)
      if (i + e < norm_dim) sum = fmaf(run[e], run[e], sum);
    store_run<float, kCount>(x + i, run);
  }
  if (weight) {
    const float mean = __fdividef(warp_sum(sum), static_cast<float>(norm_dim));
    const float scale = rsqrtf(mean + eps);
    __syncwarp();
    for (int64_t i = lane; i < norm_dim; i += 32) x[i] *= scale * __ldg(weight + i);
  }
  __syncwarp();
}

// Writes a head, rotated in its leading 2 * half elements. angle: [half] cosines, then sines.
template <int kCount>
__device__ inline void store_head(const float* x, int64_t dim, const float* angle, int64_t half,
                                  void* to, DType dtype, int64_t index) {
  for (int64_t i = threadIdx.x % 32 * kCount; i < dim; i += 32 * kCount) {
    float run[kCount];
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const int64_t at = i + e, pair = at < half ? at : at - half;
      run[e] = x[at];
      if (at < 2 * half) {
        const float other = x[at < half ? at + half : pair], cosine = angle[pair],
                    sine = angle[half + pair];
        run[e] = at < half ? x[at] * cosine - other * sine : x[at] * cosine + other * sine;
      }
    }
    store_run<kCount>(to, dtype, index + i, run);
  }
}

template <int kCount>
__global__ void __launch_bounds__(kThreads)
    prepare_attention_kernel(const __grid_constant__ AttentionInputParams p, int64_t values) {
  release_successor();
  extern __shared__ float shared[];
  const KvCache& cache = p.cache;
  const int64_t token = blockIdx.x, dim = cache.head_dim, half = p.rotary_dim / 2;
  float *angle = shared + kWarps * dim, *x = shared + threadIdx.x / 32 * dim;
  wait_for_predecessor();
  const TokenPlace place = find_token(p.batch, token);
  if (!place.exists) return;
  const int64_t rotated =
      p.depth ? p.batch.position[place.sequence] + p.depth[token] : place.position;
  for (int64_t i = threadIdx.x; i < half; i += kThreads)
    sincosf(static_cast<float>(rotated) * __ldg(p.inverse_frequency + i), angle + half + i,
            angle + i);
  __syncthreads();
  const int64_t head = int64_t{blockIdx.y} * kWarps + threadIdx.x / 32;
  if (head < p.heads) {
    load_head<kCount>(p.q, token * p.q.stride + head * dim, dim, p.q_norm, p.norm_dim, p.eps, x);
    return store_head<kCount>(x, dim, angle, half, p.q_out.data, p.q_out.dtype,
                              token * p.q_out.stride + head * dim);
  }
  const bool value = head >= p.heads + cache.kv_heads;
  const int64_t kv_head = head - p.heads - (value ? cache.kv_heads : 0);
  if (value && kv_head >= values) return;
  const InRows& from = value ? p.v : p.k;
  load_head<kCount>(from, token * from.stride + kv_head * dim, dim, value ? nullptr : p.k_norm,
                    p.norm_dim, p.eps, x);
  const int64_t block = p.batch.block_table[place.sequence * p.batch.block_table_stride +
                                            place.position / cache.block_size];
  const int64_t row =
      (block * cache.kv_heads + kv_head) * cache.block_size + place.position % cache.block_size;
  store_head<kCount>(x, dim, angle, value ? 0 : half, value ? cache.v : cache.k, cache.dtype,
                     row * dim);
}

void check(const AttentionInputParams& p, int64_t values) {
  const int64_t dim = p.cache.head_dim;
  check_count("tokens", p.tokens, 0);
  check_count("heads", p.heads, 0);
  check_count("cache.kv_heads", p.cache.kv_heads, 1);
  check_count("cache.block_size", p.cache.block_size, 1);
  if (dim < 1 || dim > kMaxHeadDim)
    fail("cache.head_dim: expected 1 to ", kMaxHeadDim, ", got ", dim);
  if (p.rotary_dim < 0 || p.rotary_dim > dim || p.rotary_dim % 2 != 0)
    fail("rotary_dim: expected an even number up to ", dim, ", got ", p.rotary_dim);
  if ((p.q_norm || p.k_norm) && (p.norm_dim < 1 || p.norm_dim > dim))
    fail("norm_dim: expected 1 to ", dim, ", got ", p.norm_dim);
  check_float("cache.dtype", p.cache.dtype);
  if (p.tokens == 0) return;
  if (p.heads > 0) {
    check_rows("q", p.q, p.tokens, p.heads * dim);
    check_rows("q_out", p.q_out, p.tokens, p.heads * dim);
  }
  check_rows("k", p.k, p.tokens, p.cache.kv_heads * dim);
  if (values > 0) check_rows("v", p.v, p.tokens, values * dim);
  check_pointer("cache.k", p.cache.k, dtype_bytes(p.cache.dtype));
  check_pointer("cache.v", p.cache.v, dtype_bytes(p.cache.dtype));
  if (p.rotary_dim > 0) check_pointer("inverse_frequency", p.inverse_frequency, sizeof(float));
  if (p.batch.sequences == 0) return;
  check_pointer("batch.query_start", p.batch.query_start, sizeof(int32_t));
  check_pointer("batch.position", p.batch.position, sizeof(int64_t));
  check_pointer("batch.block_table", p.batch.block_table, sizeof(int32_t));
}

}  // namespace

void prepare_attention(const AttentionInputParams& p, cudaStream_t stream) {
  const int64_t values = p.cache.v == p.cache.k ? 0 : p.cache.kv_heads;
  check(p, values);
  if (p.tokens == 0) return;
  constexpr int kVec = 8;
  const bool vectors = p.cache.head_dim % kVec == 0 &&
                       (p.heads == 0 || (rows_aligned(p.q) && rows_aligned(p.q_out))) &&
                       rows_aligned(p.k) && (values == 0 || rows_aligned(p.v)) &&
                       rows_aligned(p.cache.k) && rows_aligned(p.cache.v);
  const int64_t heads = p.heads + p.cache.kv_heads + values;
  const auto bytes =
      static_cast<int>((kWarps * p.cache.head_dim + p.rotary_dim) * int64_t{sizeof(float)});
  const dim3 grid(blocks_for(p.tokens, 1), blocks_for(heads, kWarps));
  const auto start = [&](auto kernel) {
    launch_dependent("prepare_attention", kernel, grid, kThreads, bytes, stream, p, values);
  };
  if (vectors) return start(prepare_attention_kernel<kVec>);
  start(prepare_attention_kernel<1>);
}

}  // namespace replayssm::cuda
