// Scalar products of keys and queries.
#pragma once

#include "ops/cuda/step_context.cuh"

namespace replayssm::cuda {

// Products of 16 rows with eight, by a warp: `row` and `other` are where this lane's of them lie
// for load_tiles. sum[2 h + e]: of row lane / 4 + 8 h and other row 2 (lane % 4) + e.
template <class Act, int kState>
__device__ inline void multiply_row_tile(const Act* row, const Act* other, float (&sum)[4]) {
  float part[2][4] = {};
#pragma unroll
  for (int k = 0; k < kState; k += 32) {
    uint32_t a[4], b[4];
    load_tiles(b, other + k);
    load_tiles(a, row + k);
    multiply_tile<Act>(part[0], a, b[0], b[1]);
    load_tiles(a, row + k + 16);
    multiply_tile<Act>(part[1], a, b[2], b[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = part[0][i] + part[1][i];
}

template <class Context>
class Products {
 public:
  using Shared = typename Context::Shared;
  using Act = typename Context::Element;
  static constexpr int kState = Shared::kPerLane * kRowLanes;

  __device__ explicit Products(const Context& context) : c_(context) {}

  // All rows with all queries. Raw keys.
  __device__ void multiply_queries() const {
    if constexpr (Context::kOperands) {
      multiply_tiles(0, 0);
    } else {
      multiply_plain();
    }
  }
  // And the rows [begin, end) with the rows before them: begin is a multiple of kTileColumns, and
  // so is end, or all rows. queries: with the queries too.
  static constexpr int kTileColumns = 8;
  __device__ void multiply_rows(int begin, int end, bool queries) const {
    multiply_tiles(begin / kTileColumns, (end + kTileColumns - 1) / kTileColumns, queries);
  }

  // The delta rule's 1 / |k| of the rows [begin, end), in groups of eight lanes. The bits of a
  // length are the same everywhere: they enter the state.
  __device__ void key_factors(int begin, int end) const {
    constexpr int kGroups = 32 / kRowLanes;
    const int row_lane = threadIdx.x % kRowLanes, group = c_.lane() / kRowLanes;
#pragma unroll 1
    for (int first = begin + c_.warp() * kGroups; first < end; first += c_.warps() * kGroups) {
      float k[Shared::kPerLane];
      Shared::template load_key<float>(c_.shared.key(min(first + group, end - 1)), row_lane, k);
      const float factor = 1.0f / sqrtf(row_sum(dot<4>(k, k)) + kL2NormEps);
      if (row_lane == 0 && first + group < end) c_.shared.key_factors()[first + group] = factor;
    }
  }

 private:
  // A warp per tile: 16 rows by eight rows, of the columns [first, others), or queries.
  __device__ void multiply_tiles(int first, int others, bool queries = true) const {
    const int row_tiles = (c_.b.rows + 15) / 16;
    const int columns = others - first + (queries ? (c_.b.window + 7) / 8 : 0);
#pragma unroll 1
    for (int n = c_.warp(); n < row_tiles * columns; n += c_.warps()) {
      const int tile = n / columns, column = first + n - tile * columns;
      if (column >= others) {
        form_tile<true>(tile * 16, (column - others) * 8);
      } else if (tile <= column / 2) {  // else all rows are behind
        form_tile<false>(tile * 16, column * 8);
      }
    }
  }
  template <bool kQueries>
  __device__ void form_tile(int row, int column) const {
    const int lane = c_.lane(), count = kQueries ? c_.b.window : c_.b.rows;
    const Act* const a_row = c_.shared.key(min(row + lane % 16, c_.b.rows - 1)) + lane / 16 * 8;
    const int other = min(column + lane % 8, count - 1);
    const Act* const b_row =
        (kQueries ? c_.shared.query(other) : c_.shared.key(other)) + lane / 8 * 8;
    float sum[4];
    multiply_row_tile<Act, kState>(a_row, b_row, sum);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int j = row + half * 8 + lane / 4, m = column + lane % 4 * 2 + e;
        if (j < c_.b.rows && m < count)
          (kQueries ? c_.shared.query_products(m) : c_.shared.row_products(m))[j] =
              sum[2 * half + e];
      }
  }

  // Groups of eight lanes take a row each.
  __device__ void multiply_plain() const {
    constexpr int kGroups = 32 / kRowLanes;
    const int row_lane = threadIdx.x % kRowLanes, group = c_.lane() / kRowLanes;
#pragma unroll 1
    for (int first = c_.warp() * kGroups; first < c_.b.rows; first += c_.warps() * kGroups) {
      const int j = min(first + group, c_.b.rows - 1);
      float k[Shared::kPerLane];
      Shared::template load_key<Act>(c_.shared.key(j), row_lane, k);
#pragma unroll 1
      for (int i = 0; i < c_.b.window; ++i) {
        float q[Shared::kPerLane];
        Shared::template load_key<Act>(c_.shared.query(i), row_lane, q);
        const float product = row_sum(dot<4>(k, q));
        if (row_lane == 0 && first + group < c_.b.rows) c_.shared.query_products(i)[j] = product;
      }
    }
  }

  const Context& c_;
};

}  // namespace replayssm::cuda
