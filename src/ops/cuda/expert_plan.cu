// Sorts pairs by expert. Every block counts all pairs, then places those of 32 experts, a warp an
// expert, in their order; the first one cuts them into tiles.

#include "ops/cuda/expert_plan.h"

#include "core/check.h"
#include "ops/cuda/block_reduce.cuh"
#include "ops/cuda/check_rows.h"
#include "ops/cuda/dependent_launch.cuh"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 1024;  // one per expert
static_assert(kThreads == kMaxExperts);

__global__ void __launch_bounds__(kThreads)
    sort_by_expert_kernel(ExpertView plan, ExpertShape shape, int tile_rows, const int32_t* expert,
                          const int32_t* live_rows) {
  release_successor();
  __shared__ int count[kMaxExperts], first[kMaxExperts], shared[kThreads / 32];
  wait_for_predecessor();
  const int64_t rows = live_rows ? min(int64_t{*live_rows}, shape.rows) : shape.rows;
  const auto pairs = static_cast<int>(rows * shape.top_k);
  const int me = static_cast<int>(threadIdx.x), lane = me % 32;
  count[me] = 0;
  __syncthreads();
  for (int i = me; i < pairs; i += kThreads) atomicAdd(&count[expert[i]], 1);
  __syncthreads();
  const int mine = count[me];
  int total;
  const int begin = block_sum_before(mine, shared, total);
  first[me] = begin;
  if (blockIdx.x == 0) {
    const int tiles = (mine + tile_rows - 1) / tile_rows,
              at = block_sum_before(tiles, shared, total);
    for (int t = 0; t < tiles; ++t)
      plan.tile[at + t] = {me, begin + t * tile_rows,
                           min(begin + (t + 1) * tile_rows, begin + mine), 0};
    if (me == 0) *plan.tiles = total;
  }
  __syncthreads();
  const int own = static_cast<int>(blockIdx.x) * 32 + me / 32;
  if (own >= shape.experts || count[own] == 0) return;
  int at = first[own];
  for (int base = 0; base < pairs; base += 32) {
    const bool hit = base + lane < pairs && expert[base + lane] == own;
    const unsigned hits = __ballot_sync(kAllLanes, hit);
    if (hit) plan.pair[at + __popc(hits & ((1u << lane) - 1))] = base + lane;
    at += __popc(hits);
  }
}

}  // namespace

void check_plan(const ExpertPlan& plan) {
  const ExpertShape& s = plan.shape;
  check_count("plan.shape.rows", s.rows, 0);
  if (s.experts < 1 || s.experts > kMaxExperts)
    fail("plan.shape.experts: expected 1 to ", kMaxExperts, ", got ", s.experts);
  if (s.top_k < 1 || s.top_k > kMaxTopK)
    fail("plan.shape.top_k: expected 1 to ", kMaxTopK, ", got ", s.top_k);
  if (s.rows > INT32_MAX / s.top_k)
    fail("plan.shape.rows: expected fewer, got ", s.rows, " of ", s.top_k, " pairs");
  check_pointer("plan.memory", plan.memory, 16);
}

int64_t expert_plan_bytes(const ExpertShape& shape) { return expert_layout(shape).total; }

void sort_by_expert(const ExpertPlan& plan, const int32_t* expert, const int32_t* live_rows,
                    cudaStream_t stream) {
  check_plan(plan);
  if (plan.shape.rows == 0) return;
  check_pointer("expert", expert, sizeof(int32_t));
  launch_dependent("sort_by_expert", sort_by_expert_kernel,
                   dim3(blocks_for(plan.shape.experts, 32)), kThreads, 0, stream, expert_view(plan),
                   plan.shape, expert_layout(plan.shape).tile_rows, expert, live_rows);
}

}  // namespace replayssm::cuda
