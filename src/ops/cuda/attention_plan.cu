// The pieces of work of a step's attention layers: one block walks over the sequences.

#include "ops/cuda/attention_plan.h"

#include "core/check.h"
#include "ops/cuda/block_reduce.cuh"
#include "ops/cuda/check_rows.h"
#include "ops/cuda/dependent_launch.cuh"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads)
    plan_attention_kernel(const __grid_constant__ KvBatch batch, AttentionCut cut,
                          AttentionPlan* plan) {
  // Kernels behind this one do not start before it is done: they read the plan at once.
  wait_for_predecessor();
  __shared__ int shared[kWarps];
  auto* items = reinterpret_cast<AttentionItem*>(plan + 1);
  int64_t planned = 0;
  for (int64_t first = 0; first < batch.sequences; first += kThreads) {
    const int64_t s = first + threadIdx.x;
    AttentionItem item{};
    int rows = 0, tiles = 0;
    KeyRanges ranges{0, 0};
    if (s < batch.sequences) {
      item.sequence = static_cast<int>(s);
      item.first_token = batch.query_start[s];
      item.position = static_cast<int>(batch.position[s]);
      const int window = batch.query_start[s + 1] - item.first_token;
      rows = window * cut.group;
      tiles = (rows + cut.rows - 1) / cut.rows;
      if (tiles > 0) ranges = key_ranges(item.position + window, tiles > 1 ? 1 : cut.splits);
    }
    item.splits = ranges.splits;
    int total;
    const int64_t at = planned + block_sum_before(tiles * ranges.splits, shared, total);
    // A warp writes the items of its lanes' sequences, one after the other.
    for (int owner = 0; owner < 32; ++owner) {
      AttentionItem own = item;
      for (int32_t* field : {&own.sequence, &own.splits, &own.first_token, &own.position})
        *field = __shfl_sync(kAllLanes, *field, owner);
      const int own_rows = __shfl_sync(kAllLanes, rows, owner),
                own_tiles = __shfl_sync(kAllLanes, tiles, owner),
                own_keys = __shfl_sync(kAllLanes, ranges.keys, owner);
      const int64_t own_at = __shfl_sync(kAllLanes, at, owner);
      for (int i = static_cast<int>(threadIdx.x) % 32; i < own_tiles * own.splits; i += 32) {
        if (own_at + i >= cut.items) break;
        // The last tiles have the most keys: they come first.
        own.first_row = (own_tiles - 1 - i / own.splits) * cut.rows;
        own.rows = min(own_rows - own.first_row, cut.rows);
        own.split = i % own.splits;
        own.key_begin = own.split * own_keys;
        own.key_end = min(own.key_begin + own_keys,
                          own.position + (own.first_row + own.rows - 1) / cut.group + 1);
        items[own_at + i] = own;
      }
    }
    planned += total;
  }
  if (threadIdx.x == 0) plan->count = static_cast<int32_t>(min(planned, cut.items));
}

}  // namespace

void plan_attention(const AttentionShape& shape, const KvBatch& batch, void* plan,
                    cudaStream_t stream) {
  check_count("batch.sequences", batch.sequences, 0);
  if (batch.sequences > shape.sequences)
    fail("batch.sequences: expected at most the shape's ", shape.sequences, ", got ",
         batch.sequences);
  if (shape.kv_heads < 1 || shape.heads % shape.kv_heads != 0)
    fail("heads: expected a multiple of the ", shape.kv_heads, " of the keys, got ", shape.heads);
  check_pointer("plan", plan, 16);
  if (batch.sequences > 0) {
    check_pointer("batch.query_start", batch.query_start, sizeof(int32_t));
    check_pointer("batch.position", batch.position, sizeof(int64_t));
  }
  launch_dependent("plan_attention", plan_attention_kernel, dim3(1), kThreads, 0, stream, batch,
                   attention_cut(shape), static_cast<AttentionPlan*>(plan));
}

int64_t attention_plan_bytes(const AttentionShape& shape) {
  return static_cast<int64_t>(sizeof(AttentionPlan)) +
         attention_cut(shape).items * static_cast<int64_t>(sizeof(AttentionItem));
}

}  // namespace replayssm::cuda
