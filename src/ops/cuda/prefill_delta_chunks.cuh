// The delta rules over prompts, in chunks. With u the values that a chunk's tokens write, k and q
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
// With decays of columns (prefill_kimi_weights.cuh) the lines are of 16 tokens each, and decays are
// in the keys and queries.
//
// Barriers per chunk: its inputs and decays are here; its factors are here; its weights are here;
// the inverses are here.
#pragma once

#include "ops/cuda/prefill_chunk_block.cuh"

namespace replayssm::cuda {

// Gated Delta's weights among a chunk's tokens: one decay a token.
template <class State, int kWarps>
class GatedWeights : protected ChunkBlock<Family::kGatedDelta, State, kWarps> {
 public:
  using Block = ChunkBlock<Family::kGatedDelta, State, kWarps>;
  using Block::Block;
  using Tile = typename Block::Tile;
  static constexpr int kBlocks = 1;  // at once

 protected:
  template <class Prepare, class Take>
  __device__ void run_chunks(Prepare&& prepare, Take&& take) {
    Block::run_chunks([&] {
      prepare();
      take();
    });
  }
  __device__ static void meet() { __syncthreads(); }
  __device__ void fade_keys() const {}
  __device__ void weigh_all() const {
    constexpr int kEach = Tile::kLowerTiles;
    for (int n = this->warp_; n < 2 * kEach; n += kWarps) {
      const bool keys = n >= kEach;
      this->weigh(this->stage() + (keys ? Tile::kKeys : 0), keys ? n - kEach : n,
                  keys ? this->decays().key : this->decays().query, keys,
                  this->weights(keys ? Tile::kOfKeys : Tile::kOfQueries));
    }
  }
};

template <class Weights>
class DeltaChunks : protected Weights {
 public:
  using Tile = typename Weights::Tile;
  using Weights::kBlocks, Weights::Weights;
  static constexpr int kState = Tile::kState, kTokens = Tile::kTokens,
                       kSpanTiles = Tile::kSpanTiles;

  __device__ void run() {
    this->run_chunks([this] { prepare(); }, [this] { take(); });
  }

 private:
  using typename Weights::Block::Pair, typename Weights::Block::Split;
  using Weights::Block::chunk_, Weights::Block::decays_, Weights::Block::lane_, Weights::Block::me_,
      Weights::Block::warp_, Weights::Block::window_;
  using Weights::Block::decays, Weights::Block::load_values, Weights::Block::read_state,
      Weights::Block::stage, Weights::Block::store_outputs, Weights::Block::update_state,
      Weights::Block::weights;

  __device__ void prepare() {
    normalise();
    this->meet();
    this->weigh_all();
    this->meet();
    for (int it = warp_; it < Tile::kTokenTiles; it += Tile::kWarps) invert(it);
    this->fade_keys();
  }

  __device__ void take() {
    const int tiles = min(Tile::kTokenTiles, (window_ - chunk_ * kTokens + 15) / 16);
#pragma unroll 1
    for (int first = 0; first < tiles; first += kSpanTiles) take_span(first);
  }
  __device__ void take_span(int first) {
    Pair y[kSpanTiles] = {}, u[kSpanTiles] = {};
    read_state(first, y, u);
    miss(first, u);
    if constexpr (!Tile::kChannels) __syncthreads();
    solve(first, u);
    add_window(first, u, y);
    store_outputs(first, y);
    update_state(first, [&u](int t, const typename Weights::Block::Factors& factor) {
      return Split(u[t][0], u[t][1], factor);
    });
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
    Bf16* const block = block_of(Tile::kOfKeys, it, it % kSpanTiles);
    const int column = lane_ % 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int first = 0; first < i; first += 8) {
        const Bf16* row = block + i * Tile::kWeightStride + first;
        float high[8], low[8];
        load_elements<Bf16, 8>(row, high);
        load_elements<Bf16, 8>(row + Tile::kPart, low);
#pragma unroll
        for (int m = first; m < min(i, first + 8); ++m)
          x[i] = fmaf(-(high[m - first] + low[m - first]), x[m], x[i]);
      }
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

  // u = v - e^L S k, where it was S k.
  __device__ void miss(int first, Pair (&u)[kSpanTiles]) const {
#pragma unroll
    for (int t = 0; t < kSpanTiles; ++t) {
      Pair v;
      load_values(first + t, v);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = (first + t) * 16 + n * 8 + lane_ % 4 * 2 + i % 2;
          float& known = u[t][n][i];
          known = fmaf(-decays().start[token] * decays().key[token], known, v[n][i]);
        }
    }
  }

  // Block of a matrix of weights: tile `it` and the span's tile jt.
  __device__ Bf16* block_of(int matrix, int it, int jt) const {
    return weights(matrix) + it * 16 * Tile::kWeightStride + jt * 16;
  }
  // As right operand: its rows are the result's columns.
  __device__ void add_products(Pair& c, const Split& a, const Bf16* block) const {
    const Bf16* b = block + (lane_ / 16 * 8 + lane_ % 8) * Tile::kWeightStride + lane_ / 8 % 2 * 8;
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
  __device__ void solve(int first, Pair (&u)[kSpanTiles]) const {
#pragma unroll
    for (int jt = 0; jt < kSpanTiles; ++jt) {
      const Split right(u[jt][0], u[jt][1], {1, 1, 1, 1});
      Pair solved = {};
      add_products(solved, right, block_of(Tile::kOfKeys, first + jt, jt));
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) u[jt][n][i] = solved[n][i];
      const Split known(u[jt][0], u[jt][1], {-1, -1, -1, -1});
#pragma unroll
      for (int it = jt + 1; it < kSpanTiles; ++it)
        add_products(u[it], known, block_of(Tile::kOfKeys, first + it, jt));
    }
  }

  // y += the span's weights times what its tokens write.
  __device__ void add_window(int first, const Pair (&u)[kSpanTiles], Pair (&y)[kSpanTiles]) const {
#pragma unroll
    for (int jt = 0; jt < kSpanTiles; ++jt) {
      const Split written(u[jt][0], u[jt][1], {1, 1, 1, 1});
#pragma unroll
      for (int it = jt; it < kSpanTiles; ++it) {
        const Bf16* w = block_of(Tile::kOfQueries, first + it, jt) +
                        lane_ % 16 * Tile::kWeightStride + lane_ / 16 * 8;
        uint32_t high[4], low[4];
        load_tiles(high, w);
        load_tiles(low, w + Tile::kPart);
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

}  // namespace replayssm::cuda
