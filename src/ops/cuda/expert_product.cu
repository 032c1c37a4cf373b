// Products of pairs with their experts' matrices: checks, choice of the kernel, and the one for
// float32, on the ordinary cores.

#include "ops/cuda/expert_product.cuh"

#include "core/check.h"
#include "ops/cuda/check_rows.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 128, kColumns = 64, kRows = 16, kDepth = 32;

// A thread has a column of the result for half of the rows that a block takes at a time.
__global__ void __launch_bounds__(kThreads)
    expert_product_single_kernel(const __grid_constant__ ExpertProductParams p, ExpertView plan) {
  release_successor();
  __shared__ float x[kRows][kDepth + 1], w[kColumns][kDepth + 1];
  __shared__ int pairs[kRows];
  wait_for_predecessor();
  if (static_cast<int>(blockIdx.y) >= *plan.tiles) return;
  const ExpertTile tile = plan.tile[blockIdx.y];
  const int me = static_cast<int>(threadIdx.x), column = me % kColumns, half = me / kColumns;
  const int64_t column0 = int64_t{blockIdx.x} * kColumns;
  const float* const matrix = static_cast<const float*>(p.weight) + tile.expert * p.out * p.in;
  for (int first = tile.begin; first < tile.end; first += kRows) {
    __syncthreads();
    if (me < kRows) pairs[me] = first + me < tile.end ? plan.pair[first + me] : -1;
    float sum[kRows / 2] = {};
    for (int64_t k0 = 0; k0 < p.in; k0 += kDepth) {
      __syncthreads();
      for (int i = me; i < (kRows + kColumns) * kDepth; i += kThreads) {
        const int r = i / kDepth, k = i % kDepth;
        const bool inside = k0 + k < p.in;
        if (r < kRows) {
          const int pair = pairs[r];
          const int64_t row = p.x_per_row ? pair / p.plan.shape.top_k : pair;
          x[r][k] = inside && pair >= 0
                        ? static_cast<const float*>(p.x.data)[row * p.x.stride + k0 + k]
                        : 0.0f;
        } else {
          const int64_t at = column0 + r - kRows;
          w[r - kRows][k] = inside && at < p.out ? matrix[at * p.in + k0 + k] : 0.0f;
        }
      }
      __syncthreads();
      for (int k = 0; k < kDepth; ++k)
#pragma unroll
        for (int r = 0; r < kRows / 2; ++r) sum[r] = fmaf(x[2 * r + half][k], w[column][k], sum[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows / 2; ++r) {
      const int pair = pairs[2 * r + half];
      if (pair < 0 || column0 + column >= p.out) continue;
      float value = sum[r];
      if (p.bias) value += p.bias[tile.expert * p.out + column0 + column];
      store_run<1>(p.y.data, p.y.dtype, pair * p.y.stride + column0 + column, &value);
    }
  }
}

template <class T, int kRowTiles, int kDepth>
void launch(const ExpertProductParams& p, dim3 grid, cudaStream_t stream) {
  using Block = ExpertBlock<kRowTiles, kDepth>;
  const auto kernel = expert_product_kernel<T, kRowTiles, kDepth>;
  reserve_shared("expert_product", kernel, Block::kBytes);
  launch_dependent("expert_product", kernel, grid, Block::kThreads, Block::kBytes, stream, p,
                   expert_view(p.plan));
}

template <class T>
void launch(const ExpertProductParams& p, dim3 grid, cudaStream_t stream) {
  if (expert_layout(p.plan.shape).tile_rows > 16) return launch<T, 4, 64>(p, grid, stream);
  // Few blocks: each has more of its matrix on the way.
  if (int64_t{grid.x} * grid.y < 4 * multiprocessors("expert_product"))
    return launch<T, 1, 128>(p, grid, stream);
  launch<T, 1, 64>(p, grid, stream);
}

void check(const ExpertProductParams& p) {
  check_plan(p.plan);
  check_count("in", p.in, 1);
  check_count("out", p.out, 1);
  const ExpertShape& s = p.plan.shape;
  check_rows("x", p.x, p.x_per_row ? s.rows : s.rows * s.top_k, p.in);
  check_rows("y", p.y, s.rows * s.top_k, p.out);
  const int64_t bytes = dtype_bytes(p.x.dtype);
  check_pointer("weight", p.weight, bytes);
  if (p.bias) check_pointer("bias", p.bias, sizeof(float));
  if (p.x.dtype == DType::kFloat32) return;
  if (!rows_aligned(p.x)) fail("x: expected rows at multiples of 16 bytes");
  if (!rows_aligned(p.weight, p.in * bytes))
    fail("weight: expected rows at multiples of 16 bytes, got ", p.in, " elements a row");
}

}  // namespace

void expert_product(const ExpertProductParams& p, cudaStream_t stream) {
  if (p.plan.shape.rows == 0) return;
  check(p);
  const int64_t tiles = expert_layout(p.plan.shape).most_tiles;
  if (tiles > 65535) fail("plan.shape.rows: expected fewer, got ", p.plan.shape.rows);
  const dim3 grid(blocks_for(p.out, kColumns), static_cast<unsigned>(tiles));
  switch (p.x.dtype) {
    case DType::kBFloat16: return launch<Bf16>(p, grid, stream);
    case DType::kFloat16: return launch<Fp16>(p, grid, stream);
    default:
      launch_dependent("expert_product", expert_product_single_kernel, grid, kThreads, 0, stream, p,
                       expert_view(p.plan));
  }
}

}  // namespace replayssm::cuda
