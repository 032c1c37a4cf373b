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
class Mamba2Chunks : protected ChunkBlock<Family::kMamba2, State, kWarps> {
 public:
  using Block = ChunkBlock<Family::kMamba2, State, kWarps>;
  using Block::Block, Block::kSpanTiles;
  using Tile = typename Block::Tile;
  static constexpr int kBlocks = kWarps <= 5 ? 2 : 1;  // at once

  __device__ void run() {
    this->run_chunks([this] {
      for (int n = warp_; n < Tile::kLowerTiles; n += kWarps)
        this->weigh(stage(), n, nullptr, false, weights(0));
      Pair y[kSpanTiles] = {};
      read_state(0, y);
      __syncthreads();
      add_window(y);
      store_outputs(0, y);
      update_state(0, [this](int jt, const typename Block::Factors& factor) {
        Pair v;
        load_values(jt, v);
        return typename Block::Split(v[0], v[1], factor);
      });
    });
  }

 private:
  using Block::lane_, Block::warp_;
  using Block::load_values, Block::read_state, Block::row0, Block::stage, Block::store_outputs,
      Block::update_state, Block::weights;
  using typename Block::Pair;

  // y += the chunk's weights times its values.
  __device__ void add_window(Pair (&y)[kSpanTiles]) const {
    const Bf16* w = weights(0) + lane_ % 16 * Tile::kWeightStride + lane_ / 16 * 8;
    const Bf16* v = stage() + Tile::kValues + (lane_ / 8 % 2 * 8 + lane_ % 8) * Tile::kValueStride +
                    row0() + lane_ / 16 * 8;
#pragma unroll
    for (int jt = 0; jt < kSpanTiles; ++jt) {
      uint32_t b[4];
      load_tiles_transposed(b, v + jt * 16 * Tile::kValueStride);
#pragma unroll
      for (int it = jt; it < kSpanTiles; ++it)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          uint32_t a[4];
          load_tiles(a, w + part * Tile::kPart + it * 16 * Tile::kWeightStride + jt * 16);
          multiply_tile<Bf16>(y[it][0], a, b[0], b[1]);
          multiply_tile<Bf16>(y[it][1], a, b[2], b[3]);
        }
    }
  }
};

template <class Chunks>
__global__ void __launch_bounds__(Chunks::Tile::kBlockThreads, Chunks::kBlocks)
    prefill_chunks_kernel(const __grid_constant__ RecurrentPrefillParams p) {
  release_successor();
  extern __shared__ uint4 memory[];
  Chunks block(p, reinterpret_cast<Bf16*>(memory));
  wait_for_predecessor();
  block.run();
}

}  // namespace replayssm::cuda
