// What the attention kernels share: where a piece of work lies, and how its output leaves.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/attention_call.h"
#include "ops/cuda/block_reduce.cuh"
#include "ops/cuda/dependent_launch.cuh"

namespace replayssm::cuda {

// A piece of work: an item for one head of keys.
struct AttentionWork : AttentionItem {
  // The last key that a row may see.
  __device__ int last_key(const AttentionCall& call, int row) const {
    return position + static_cast<int>(call.group.divide(static_cast<uint32_t>(first_row + row)));
  }
  // KvBatch::ancestors of a row's token.
  __device__ uint64_t ancestors(const AttentionCall& call, int row) const {
    const auto at = static_cast<uint32_t>(first_row + row);
    return call.p.batch.ancestors[first_token + call.group.divide(at)];
  }
  // Whether a token of a tree with these ancestors sees a key. Without any it is no tree's.
  __device__ bool sees(uint64_t ancestors, int key) const {
    const int bit = key - position;
    return ancestors == 0 || bit < 0 || (bit < 64 && (ancestors >> bit & 1) != 0);
  }
  // Where a row's token and head begin in rows of [heads, head_dim].
  __device__ int64_t offset(const AttentionCall& call, int row, int64_t stride, int64_t dim) const {
    const auto at = static_cast<uint32_t>(first_row + row), token = call.group.divide(at);
    return (int64_t{first_token} + token) * stride +
           (int64_t{kv_head()} * call.cut.group + (at - token * call.cut.group)) * dim;
  }
  __device__ int kv_head() const { return unused[0]; }
};

// Pieces are items times heads of keys.
__device__ inline AttentionWork load_work(const AttentionCall& call, int index) {
  const uint32_t item = call.kv_heads.divide(static_cast<uint32_t>(index));
  AttentionWork work{reinterpret_cast<const AttentionItem*>(call.plan + 1)[item]};
  work.unused[0] = index - static_cast<int>(item * call.kv_heads.divisor);
  return work;
}

// The cache's block that has a key, and element 0 of the key in there, in elements.
__device__ inline int cache_block(const AttentionCall& call, const AttentionWork& work, int key) {
  const uint32_t block = call.block_size.divide(static_cast<uint32_t>(key));
  return __ldg(call.p.batch.block_table + work.sequence * call.p.batch.block_table_stride + block);
}
__device__ inline int64_t cache_row(const AttentionCall& call, const AttentionWork& work, int block,
                                    int key) {
  const KvCache& cache = call.p.cache;
  return ((int64_t{block} * cache.kv_heads + work.kv_head()) * cache.block_size +
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
__device__ inline int64_t partial_row(const AttentionCall& call, int64_t sequence, int kv_head,
                                      int split, int row) {
  const int64_t head = sequence * call.p.cache.kv_heads + kv_head;
  return (head * call.cut.splits + split) * call.part_rows + row;
}

__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace replayssm::cuda
