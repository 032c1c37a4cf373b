// Products of sorted pairs with their experts' matrices, on the tensor cores.
//
// A block has a tile of one expert's pairs and kColumns rows of its matrix, which it streams in
// steps of kDepth; kStages - 1 steps are in flight. A warp has kColumns / kWarps columns of the
// result for all the tile's pairs.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/expert_plan.h"
#include "ops/cuda/mma.cuh"

namespace replayssm::cuda {

template <int kRowTiles, int kDepthOf>
struct ExpertBlock {
  static constexpr int kWarps = 4, kThreads = kWarps * 32, kRows = 16 * kRowTiles;
  static constexpr int kColumns = 64, kColumnTiles = kColumns / kWarps / 8;  // of a warp
  static constexpr int kDepth = kDepthOf, kStride = kDepth + 8, kStages = 4;
  static constexpr int kStage = (kRows + kColumns) * kStride;  // elements: pairs, then the matrix
  static constexpr int kBytes = kStages * kStage * 2;
};

// A warp's products of one step in shared memory: `a` and `b` are this lane's rows of the pairs and
// of the matrix.
template <class T, class Block, int kRowTiles>
__device__ inline void multiply_step(const T* a, const T* b,
                                     float (&sum)[kRowTiles][Block::kColumnTiles][4]) {
#pragma unroll
  for (int k = 0; k < Block::kDepth; k += 32) {
    uint32_t y[Block::kColumnTiles][4];
#pragma unroll
    for (int n = 0; n < Block::kColumnTiles; ++n) load_tiles(y[n], b + n * 8 * Block::kStride + k);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t x[4];
        load_tiles(x, a + m * 16 * Block::kStride + k + half * 16);
#pragma unroll
        for (int n = 0; n < Block::kColumnTiles; ++n)
          multiply_tile<T>(sum[m][n], x, y[n][2 * half], y[n][2 * half + 1]);
      }
  }
}

// column0: of this lane's first.
template <class Block, int kRowTiles>
__device__ inline void store_products(const ExpertProductParams& p, const int* pairs, int rows,
                                      int expert, int column0,
                                      const float (&sum)[kRowTiles][Block::kColumnTiles][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < Block::kColumnTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = m * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + i / 2 * 8;
        const int column = column0 + n * 8 + i % 2;
        if (r >= rows || column >= p.out) continue;
        float value = sum[m][n][i];
        if (p.bias) value += p.bias[expert * p.out + column];
        store_run<1>(p.y.data, p.y.dtype, pairs[r] * p.y.stride + column, &value);
      }
}

template <class T, int kRowTiles, int kDepth>
__global__ void __launch_bounds__(ExpertBlock<kRowTiles, kDepth>::kThreads)
    expert_product_kernel(const __grid_constant__ ExpertProductParams p, ExpertView plan) {
  using Block = ExpertBlock<kRowTiles, kDepth>;
  release_successor();
  extern __shared__ uint4 memory[];
  __shared__ int pairs[Block::kRows];
  T* const shared = reinterpret_cast<T*>(memory);
  const int me = static_cast<int>(threadIdx.x), lane = me % 32, warp = me / 32;
  const int column0 = static_cast<int>(blockIdx.x) * Block::kColumns;
  const int in = static_cast<int>(p.in), steps = (in + Block::kDepth - 1) / Block::kDepth;
  wait_for_predecessor();
  if (static_cast<int>(blockIdx.y) >= *plan.tiles) return;
  const ExpertTile tile = plan.tile[blockIdx.y];
  const int rows = tile.end - tile.begin;
  for (int r = me; r < Block::kRows; r += Block::kThreads)
    pairs[r] = r < rows ? plan.pair[tile.begin + r] : -1;
  __syncthreads();

  // The runs that a thread fetches lie in the same rows at every step.
  constexpr int kRuns = Block::kDepth / 8,
                kFetches = (Block::kRows + Block::kColumns) * kRuns / Block::kThreads;
  const T* const matrix = static_cast<const T*>(p.weight) + int64_t{tile.expert} * p.out * p.in;
  const int run = me % kRuns * 8;
  const T* from[kFetches];
  unsigned exists = 0;
#pragma unroll
  for (int n = 0; n < kFetches; ++n) {
    const int r = (me + n * Block::kThreads) / kRuns, column = column0 + r - Block::kRows;
    from[n] = matrix + int64_t{column} * p.in + run;
    bool here = column < p.out;
    if (r < Block::kRows) {
      const int pair = pairs[r];
      const int64_t row = p.x_per_row ? pair / static_cast<int>(p.plan.shape.top_k) : pair;
      from[n] = static_cast<const T*>(p.x.data) + row * p.x.stride + run;
      here = pair >= 0;
    }
    if (here) exists |= 1u << n;
  }
  const auto fetch = [&](int step) {
    T* const to = shared + step % Block::kStages * Block::kStage + run;
    const int k = step * Block::kDepth;
    const unsigned there = k + run < in ? exists : 0;
#pragma unroll
    for (int n = 0; n < kFetches; ++n) {
      const int r = (me + n * Block::kThreads) / kRuns;
      const bool here = there >> n & 1;
      copy_async_16_or_zero(to + r * Block::kStride, here ? from[n] + k : matrix, here);
    }
  };
  float sum[kRowTiles][Block::kColumnTiles][4] = {};
  for (int s = 0; s < Block::kStages - 1; ++s) {
    if (s < steps) fetch(s);
    copy_async_commit();
  }
  for (int step = 0; step < steps; ++step) {
    copy_async_wait_but<Block::kStages - 2>();
    __syncthreads();
    if (step + Block::kStages - 1 < steps) fetch(step + Block::kStages - 1);
    copy_async_commit();
    const T* const stage = shared + step % Block::kStages * Block::kStage;
    const T* const a = stage + lane % 16 * Block::kStride + lane / 16 * 8;
    const T* const b = stage + Block::kRows * Block::kStride +
                       (warp * Block::kColumnTiles * 8 + lane % 8) * Block::kStride + lane / 8 * 8;
    multiply_step<T, Block, kRowTiles>(a, b, sum);
  }
  store_products<Block, kRowTiles>(p, pairs, rows, tile.expert,
                                   column0 + warp * Block::kColumnTiles * 8 + lane % 4 * 2, sum);
}

}  // namespace replayssm::cuda
