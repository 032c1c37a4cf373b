// Mamba-2 over prompts, in chunks:
//
//   o_i = e^{L_i} S q_i + sum_{j<=i} e^{D_ij} b_j (q_i . k_j) v_j
//   S  <- e^{L_n} S + sum_j e^{D_nj} b_j v_j k_j^T
//
// Barriers per chunk: its inputs and decays are here; its weights are here.
#pragma once

#include "ops/cuda/prefill_chunk_block.cuh"

namespace replayssm::cuda {

template <class State, int kWarps>
class Mamba2Chunks : protected ChunkBlock<State, kWarps, 1> {
 public:
  using Block = ChunkBlock<State, kWarps, 1>;
  using Block::Block, Block::kColumnTiles, Block::kTokens, Block::kTokenTiles;
  using Tile = typename Block::Tile;

  __device__ void run() {
    if (window_ == 0) return;
    if (slot_ < 0) return clear();
    fetch(0);
    next_gates(0);
    load_state();
    const int chunks = (window_ + kTokens - 1) / kTokens;
    for (chunk_ = 0; chunk_ < chunks; ++chunk_) {
      if (warp_ == 0) keep_decays();
      copy_async_wait_but<0>();
      __syncthreads();
      if (chunk_ + 1 < chunks) {
        fetch(chunk_ + 1);
        next_gates(chunk_ + 1);
      }
      for (int n = warp_; n < Tile::kLowerTiles; n += kWarps)
        this->weigh(stage(), n, nullptr, false, weights(0));
      float y[kTokenTiles][2][4] = {};
      read_state(y, nullptr);
      __syncthreads();
      add_window(y);
      store_outputs(y);
      update_state();
    }
    store_state();
  }

 private:
  using Block::chunk_, Block::lane_, Block::p_, Block::s_, Block::slot_, Block::warp_,
      Block::window_;
  using Block::clear, Block::decays, Block::fetch, Block::keep_decays, Block::load_state,
      Block::next_gates, Block::read_state, Block::row0, Block::stage, Block::store_outputs,
      Block::store_state, Block::weights;

  // y += the chunk's weights times its values.
  __device__ void add_window(float (&y)[kTokenTiles][2][4]) const {
    const Bf16* w = weights(0) + lane_ % 16 * Tile::kWeightStride + lane_ / 16 * 8;
    const Bf16* v = stage() + Tile::kValues + (lane_ / 8 % 2 * 8 + lane_ % 8) * Tile::kValueStride +
                    row0() + lane_ / 16 * 8;
#pragma unroll
    for (int jt = 0; jt < kTokenTiles; ++jt) {
      uint32_t b[4];
      load_tiles_transposed(b, v + jt * 16 * Tile::kValueStride);
#pragma unroll
      for (int it = jt; it < kTokenTiles; ++it)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          uint32_t a[4];
          load_tiles(a, w + part * Tile::kPart + it * 16 * Tile::kWeightStride + jt * 16);
          multiply_tile<Bf16>(y[it][0], a, b[0], b[1]);
          multiply_tile<Bf16>(y[it][1], a, b[2], b[3]);
        }
    }
  }

  __device__ void update_state() {
    const float all = decays().start[kTokens - 1];
#pragma unroll
    for (auto& tile : s_)
#pragma unroll
      for (float& x : tile) x *= all;
    // Tiles of values, transposed: their rows are this warp's.
    const Bf16* v = stage() + Tile::kValues + (lane_ / 16 * 8 + lane_ % 8) * Tile::kValueStride +
                    row0() + lane_ / 8 % 2 * 8;
    const Bf16* k =
        stage() + Tile::kKeys + (lane_ / 8 % 2 * 8 + lane_ % 8) * Tile::kKeyStride + lane_ / 16 * 8;
#pragma unroll
    for (int jt = 0; jt < kTokenTiles; ++jt) {
      uint32_t raw[4], high[4], low[4];
      load_tiles_transposed(raw, v + jt * 16 * Tile::kValueStride);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* w = decays().end + jt * 16 + i / 2 * 8 + lane_ % 4 * 2;
        float x[2];
        widen<Bf16>(raw[i], x);
        const SplitPair split = split_pair(x[0] * w[0], x[1] * w[1]);
        high[i] = split.high;
        low[i] = split.low;
      }
#pragma unroll
      for (int c = 0; c < kColumnTiles; c += 2) {
        uint32_t b[4];
        load_tiles_transposed(b, k + jt * 16 * Tile::kKeyStride + c * 8);
        multiply_tile<Bf16>(s_[c], high, b[0], b[1]);
        multiply_tile<Bf16>(s_[c], low, b[0], b[1]);
        multiply_tile<Bf16>(s_[c + 1], high, b[2], b[3]);
        multiply_tile<Bf16>(s_[c + 1], low, b[2], b[3]);
      }
    }
  }
};

template <class State, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kWarps <= 5 ? 2 : 1)
    prefill_chunks_kernel(const __grid_constant__ RecurrentPrefillParams p) {
  release_successor();
  extern __shared__ uint4 memory[];
  Mamba2Chunks<State, kWarps> block(p, reinterpret_cast<Bf16*>(memory));
  wait_for_predecessor();
  block.run();
}

}  // namespace replayssm::cuda
