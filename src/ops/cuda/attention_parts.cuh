// What the attention kernels share: where a piece of work lies, how its output leaves, and how the
// ranges of keys are put together by the block that finishes last.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/attention_call.h"
#include "ops/cuda/block_reduce.cuh"
#include "ops/cuda/dependent_launch.cuh"

namespace replayssm::cuda {

// A piece of work.
struct AttentionWork {
  AttentionItem item;
  int kv_head;
  int first_row, rows;     // of the window's [tokens, group]; rows that exist
  int key_begin, key_end;  // keys that the block goes through

  // The last key that a row may see.
  __device__ int last_key(const AttentionCall& call, int row) const {
    return item.position + (first_row + row) / call.cut.group;
  }
  // Where a row's token and head begin in rows of [heads, head_dim].
  __device__ int64_t offset(const AttentionCall& call, int row, int64_t stride, int64_t dim) const {
    const int token = (first_row + row) / call.cut.group, head = (first_row + row) % call.cut.group;
    return (int64_t{item.first_token} + token) * stride +
           (int64_t{kv_head} * call.cut.group + head) * dim;
  }
};

// Pieces are items times heads of keys.
__device__ inline AttentionItem load_item(const AttentionCall& call, int index) {
  const auto* items = reinterpret_cast<const AttentionItem*>(call.plan + 1);
  return items[index / static_cast<int>(call.p.cache.kv_heads)];
}
__device__ inline AttentionWork make_work(const AttentionCall& call, const AttentionItem& item,
                                          int index) {
  AttentionWork work;
  work.item = item;
  work.kv_head = index % static_cast<int>(call.p.cache.kv_heads);
  work.first_row = item.tile * call.cut.rows;
  work.rows = min(item.window * call.cut.group - work.first_row, call.cut.rows);
  const int keys = item.position + item.window;
  const int range =
      item.splits > 1 ? static_cast<int>(keys_per_split(keys, call.cut.splits)) : keys;
  work.key_begin = item.split * range;
  work.key_end = min(work.key_begin + range, work.last_key(call, work.rows - 1) + 1);
  return work;
}

// The cache's block that has a key, and element 0 of the key in there, in elements.
__device__ inline int cache_block(const AttentionCall& call, const AttentionWork& work, int key) {
  const uint32_t block = call.block_size.divide(static_cast<uint32_t>(key));
  return __ldg(call.p.batch.block_table + work.item.sequence * call.p.batch.block_table_stride +
               block);
}
__device__ inline int64_t cache_row(const AttentionCall& call, const AttentionWork& work, int block,
                                    int key) {
  const KvCache& cache = call.p.cache;
  return ((int64_t{block} * cache.kv_heads + work.kv_head) * cache.block_size +
          call.block_size.modulo(static_cast<uint32_t>(key))) *
         cache.head_dim;
}

// Consecutive values of a row's output.
template <int kCount>
__device__ inline void store_output(const AttentionCall& call, const AttentionWork& work, int row,
                                    int column, float (&x)[kCount]) {
  const AttentionParams& p = call.p;
  const int64_t dim = p.cache.head_dim;
  if (p.gate.data) {
    const int64_t gate_at = work.offset(call, row, p.gate.stride, dim) + column;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      float gate;
      load_run<1>(p.gate.data, p.gate.dtype, gate_at + e, &gate);
      x[e] *= sigmoid(gate);
    }
  }
  const int64_t at = work.offset(call, row, p.out.stride, dim) + column;
#pragma unroll
  for (int e = 0; e < kCount; ++e) store_run<1>(p.out.data, p.out.dtype, at + e, x + e);
}

// Where a row of an unfinished range lies.
__device__ inline int64_t partial_row(const AttentionCall& call, const AttentionWork& work,
                                      int split, int row) {
  const int64_t head = int64_t{work.item.sequence} * call.p.cache.kv_heads + work.kv_head;
  return (head * call.cut.splits + split) * call.part_rows + row;
}

__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// After all threads have left their part of a range: the block that finds all others done puts them
// together, in their order. factor: kMostParts floats of shared memory. Scores are powers of
// two.
template <int kThreads>
__device__ void join_ranges(const AttentionCall& call, const AttentionWork& work, float* factor) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* counter =
        call.counters + int64_t{work.item.sequence} * call.p.cache.kv_heads + work.kv_head;
    last = atomicAdd(counter, 1) == work.item.splits - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int row = static_cast<int>(threadIdx.x); row < work.rows; row += kThreads) {
    float most = -INFINITY, sum = 0;
    for (int s = 0; s < work.item.splits; ++s)
      most = fmaxf(most, __ldcg(&call.partial_sum[partial_row(call, work, s, row)]).x);
    for (int s = 0; s < work.item.splits; ++s) {
      const float2 part = __ldcg(&call.partial_sum[partial_row(call, work, s, row)]);
      const float weight = power_of_two(part.x - most);
      factor[s * work.rows + row] = weight;
      sum = fmaf(part.y, weight, sum);
    }
    for (int s = 0; s < work.item.splits; ++s) factor[s * work.rows + row] /= sum;
  }
  __syncthreads();
  const int dim = static_cast<int>(call.p.cache.head_dim);
  for (int i = static_cast<int>(threadIdx.x); i < work.rows * dim / 4; i += kThreads) {
    const int row = i * 4 / dim, column = i * 4 % dim;
    float sum[4] = {};
#pragma unroll 4
    for (int s = 0; s < work.item.splits; ++s) {
      const float4 part = __ldcg(reinterpret_cast<const float4*>(
          call.partial + partial_row(call, work, s, row) * dim + column));
      const float weight = factor[s * work.rows + row];
      sum[0] = fmaf(part.x, weight, sum[0]), sum[1] = fmaf(part.y, weight, sum[1]);
      sum[2] = fmaf(part.z, weight, sum[2]), sum[3] = fmaf(part.w, weight, sum[3]);
    }
    store_output(call, work, row, column, sum);
  }
}

}  // namespace replayssm::cuda
