// Puts the ranges of keys together: a warp has a row of a sequence that was cut.

#include "ops/cuda/attention_instances.h"
#include "ops/cuda/attention_parts.cuh"

namespace replayssm::cuda {
namespace {

constexpr int kWarps = 4, kRun = 4;
static_assert(kMostSplits <= 64);

__global__ void __launch_bounds__(kWarps * 32)
    join_attention_kernel(const __grid_constant__ AttentionCall call) {
  release_successor();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int kv_head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z);
  const KvBatch& batch = call.p.batch;
  AttentionWork work{};
  work.first_token = batch.query_start[sequence];
  work.unused[0] = kv_head;
  const int window = batch.query_start[sequence + 1] - work.first_token;
  if (row >= window * call.cut.group) return;
  const int splits =
      key_ranges(static_cast<int>(batch.position[sequence]) + window, call.cut.splits).splits;
  if (splits == 1) return;
  wait_for_predecessor();
  float most = -INFINITY, weight[2], sum = 0;
  float2 part[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int split = i * 32 + lane;
    part[i] = make_float2(-INFINITY, 0);
    if (split < splits)
      part[i] = call.partial_sum[partial_row(call, sequence, kv_head, split, row)];
    most = fmaxf(most, part[i].x);
  }
  most = warp_max(most);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    weight[i] = power_of_two(part[i].x - most);
    sum = fmaf(part[i].y, weight[i], sum);
  }
  const float factor = __fdividef(1.0f, warp_sum(sum));
  const int dim = static_cast<int>(call.p.cache.head_dim);
  const float* from = call.partial + partial_row(call, sequence, kv_head, 0, row) * dim;
  const int64_t stride = int64_t{call.part_rows} * dim;
  for (int base = 0; base < dim; base += 32 * kRun) {
    const int column = base + lane * kRun;
    float x[kRun] = {};
#pragma unroll 8
    for (int split = 0; split < splits; ++split) {
      const float w = __shfl_sync(kAllLanes, split < 32 ? weight[0] : weight[1], split % 32);
      if (column >= dim) continue;
      const float4 y = *reinterpret_cast<const float4*>(from + split * stride + column);
      x[0] = fmaf(y.x, w, x[0]), x[1] = fmaf(y.y, w, x[1]);
      x[2] = fmaf(y.z, w, x[2]), x[3] = fmaf(y.w, w, x[3]);
    }
    if (column >= dim) continue;
#pragma unroll
    for (float& value : x) value *= factor;
    store_output(call, work, row, column, x);
  }
}

}  // namespace

void join_attention(const AttentionCall& call, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((call.part_rows + kWarps - 1) / kWarps);
  launch_dependent("paged_attention", join_attention_kernel,
                   dim3(blocks, static_cast<unsigned>(call.p.cache.kv_heads),
                        static_cast<unsigned>(call.p.batch.sequences)),
                   kWarps * 32, 0, stream, call);
}

}  // namespace replayssm::cuda
