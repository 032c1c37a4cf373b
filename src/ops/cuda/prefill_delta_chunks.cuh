// Gated Delta over prompts, in chunks. With u the values that a chunk's tokens write, k and q
// normalised and scaled:
//
//   u_i = v_i - e^{L_i} S k_i - sum_{j<i} e^{D_ij} b_j (k_i . k_j) u_j
//   o_i = e^{L_i} S q_i + sum_{j<=i} e^{D_ij} b_j (q_i . k_j) u_j
//   S  <- e^{L_n} S + sum_j e^{D_nj} b_j u_j k_j^T
//
// The first line is a system of equations (I + M) u = r with M strictly lower and the same for all
// rows of the state. Its blocks of 16 tokens on the diagonal are inverted, a warp each; then every
// warp solves for its own rows, block by block, in products. A warp's u lie as the accumulators of
// products [rows, tokens]: that is as the last line's left and the second line's right operands do.
//
// Barriers per chunk: its inputs and decays are here; its factors are here; its weights are here;
// the inverses are here.
#pragma once

#include "ops/cuda/prefill_chunk_block.cuh"

namespace replayssm::cuda {

template <class State, int kWarps>
class DeltaChunks : protected ChunkBlock<State, kWarps, 2> {
 public:
  using Block = ChunkBlock<State, kWarps, 2>;
  using Block::Block, Block::kColumnTiles, Block::kState, Block::kTokens, Block::kTokenTiles;
  using Tile = typename Block::Tile;
  // [16 rows, tokens] in tiles of 8 tokens.
  using Written = float[2 * kTokenTiles][4];

  __device__ void run() {
    this->run_chunks([this] {
      normalise();
      __syncthreads();
      weigh_all();
      __syncthreads();
      for (int it = warp_; it < kTokenTiles; it += kWarps) invert(it);
      float y[kTokenTiles][2][4] = {};
      read_state(y, decays().query);
      Written u;
      miss(u);
      __syncthreads();
      solve(u);
      add_window(u, y);
      store_outputs(y);
      update_state([&u](int jt, const typename Block::Factors& factor) {
        return Split(u[2 * jt], u[2 * jt + 1], factor);
      });
    });
  }

 private:
  using Block::chunk_, Block::decays_, Block::lane_, Block::me_, Block::s_, Block::warp_;
  using Block::decays, Block::load_values, Block::read_state, Block::stage, Block::store_outputs,
      Block::update_state, Block::weights;
  using Split = typename Block::Split;
  using Pair = typename Block::Pair;
  static constexpr int kOfQueries = 0, kOfKeys = 1;

  __device__ void weigh_all() const {
    constexpr int kEach = Tile::kLowerTiles;
    for (int n = warp_; n < 2 * kEach; n += kWarps) {
      const bool keys = n >= kEach;
      this->weigh(stage() + (keys ? Tile::kKeys : 0), keys ? n - kEach : n,
                  keys ? decays().key : decays().query, keys, weights(keys ? kOfKeys : kOfQueries));
    }
  }

  // Two threads have a row of keys or queries.
  __device__ void normalise() const {
    auto& to = decays_[chunk_ & 1];
    const float query_scale = rsqrtf(static_cast<float>(kState));
#pragma unroll 1
    for (int row = me_ / 2; row < 2 * kTokens; row += Tile::kThreads / 2) {
      const int t = row % kTokens;
      const bool is_key = row < kTokens;
      const Bf16* from =
          stage() + (is_key ? Tile::kKeys : 0) + t * Tile::kKeyStride + me_ % 2 * (kState / 2);
      float sum = 0;
#pragma unroll
      for (int c = 0; c < kState / 2; c += 8) {
        float x[8];
        load_elements<Bf16, 8>(from + c, x);
#pragma unroll
        for (const float value : x) sum = fmaf(value, value, sum);
      }
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      const float factor = rsqrtf(sum + kL2NormEps);
      if (me_ % 2 > 0) continue;
      if (is_key) {
        to.key[t] = factor;
        to.strength[t] *= factor;
        to.end[t] *= factor;
      } else {
        to.query[t] = factor * query_scale;
      }
    }
  }

  // Block `it` of I + M by its inverse: a lane has a column.
  __device__ void invert(int it) const {
    Bf16* const block = weights(kOfKeys) + it * 16 * (Tile::kWeightStride + 1);
    const int column = lane_ % 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const Bf16* row = block + i * Tile::kWeightStride;
      x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int m = 0; m < i; ++m)
        x[i] = fmaf(-(to_float(row[m]) + to_float(row[Tile::kPart + m])), x[m], x[i]);
    }
    __syncwarp();
    if (lane_ >= 16) return;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      Bf16* to = block + i * Tile::kWeightStride + column;
      to[0] = from_float<Bf16>(x[i]);
      to[Tile::kPart] = from_float<Bf16>(x[i] - to_float(to[0]));
    }
  }

  // u = v - e^L S k.
  __device__ void miss(Written& u) const {
#pragma unroll
    for (auto& tile : u)
#pragma unroll
      for (float& x : tile) x = 0;
    const Bf16* k =
        stage() + Tile::kKeys + (lane_ / 16 * 8 + lane_ % 8) * Tile::kKeyStride + lane_ / 8 % 2 * 8;
#pragma unroll
    for (int c = 0; c < kColumnTiles; c += 2) {
      const Split state(s_[c], s_[c + 1], {1, 1, 1, 1});
#pragma unroll
      for (int jt = 0; jt < kTokenTiles; ++jt) {
        uint32_t b[4];
        load_tiles(b, k + jt * 16 * Tile::kKeyStride + c * 8);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          multiply_tile<Bf16>(u[2 * jt + n], state.high, b[2 * n], b[2 * n + 1]);
          multiply_tile<Bf16>(u[2 * jt + n], state.low, b[2 * n], b[2 * n + 1]);
        }
      }
    }
#pragma unroll
    for (int jt = 0; jt < kTokenTiles; ++jt) {
      Pair v;
      load_values(jt, v);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int t = jt * 16 + n * 8 + lane_ % 4 * 2 + i % 2;
          float& known = u[2 * jt + n][i];
          known = fmaf(-decays().start[t] * decays().key[t], known, v[n][i]);
        }
    }
  }

  // Blocks of a matrix of weights as right operands: its rows are the result's columns.
  __device__ const Bf16* block_of(int matrix, int it, int jt) const {
    return weights(matrix) + (it * 16 + lane_ / 16 * 8 + lane_ % 8) * Tile::kWeightStride +
           jt * 16 + lane_ / 8 % 2 * 8;
  }
  __device__ static void add_products(Pair& c, const Split& a, const Bf16* b) {
    uint32_t high[4], low[4];
    load_tiles(high, b);
    load_tiles(low, b + Tile::kPart);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      multiply_tile<Bf16>(c[n], a.high, high[2 * n], high[2 * n + 1]);
      multiply_tile<Bf16>(c[n], a.low, high[2 * n], high[2 * n + 1]);
      multiply_tile<Bf16>(c[n], a.high, low[2 * n], low[2 * n + 1]);
    }
  }

  // u becomes the solution of (I + M) x = u.
  __device__ void solve(Written& u) const {
#pragma unroll
    for (int jt = 0; jt < kTokenTiles; ++jt) {
      auto& block = reinterpret_cast<Pair&>(u[2 * jt]);
      const Split right(block[0], block[1], {1, 1, 1, 1});
      Pair solved = {};
      add_products(solved, right, block_of(kOfKeys, jt, jt));
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) block[n][i] = solved[n][i];
      const Split known(block[0], block[1], {-1, -1, -1, -1});
#pragma unroll
      for (int it = jt + 1; it < kTokenTiles; ++it)
        add_products(reinterpret_cast<Pair&>(u[2 * it]), known, block_of(kOfKeys, it, jt));
    }
  }

  // y += the chunk's weights times what its tokens write.
  __device__ void add_window(const Written& u, float (&y)[kTokenTiles][2][4]) const {
    const Bf16* w = weights(kOfQueries) + lane_ % 16 * Tile::kWeightStride + lane_ / 16 * 8;
#pragma unroll
    for (int jt = 0; jt < kTokenTiles; ++jt) {
      const Split written(u[2 * jt], u[2 * jt + 1], {1, 1, 1, 1});
#pragma unroll
      for (int it = jt; it < kTokenTiles; ++it) {
        uint32_t high[4], low[4];
        load_tiles(high, w + it * 16 * Tile::kWeightStride + jt * 16);
        load_tiles(low, w + Tile::kPart + it * 16 * Tile::kWeightStride + jt * 16);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          multiply_tile<Bf16>(y[it][h], high, written.high[h], written.high[h + 2]);
          multiply_tile<Bf16>(y[it][h], high, written.low[h], written.low[h + 2]);
          multiply_tile<Bf16>(y[it][h], low, written.high[h], written.high[h + 2]);
        }
      }
    }
  }
};

template <class State, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 1)
    prefill_delta_chunks_kernel(const __grid_constant__ RecurrentPrefillParams p) {
  release_successor();
  extern __shared__ uint4 memory[];
  DeltaChunks<State, kWarps> block(p, reinterpret_cast<Bf16*>(memory));
  wait_for_predecessor();
  block.run();
}

}  // namespace replayssm::cuda
