// Kimi Delta's weights among a chunk's tokens: decays are vectors, so that a weight is a sum over
// columns of products of a query or key, a key and all decays between the two tokens.
//
// No decay is divided by: every product of decays runs from an older token to a newer one, and its
// factors are at most one. The state moves on after 16 tokens; it is read with queries and keys
// times the decays from the first of them on and written with keys times the decays up to the last.
// Weights among the 16 are formed on the ordinary cores.
//
// While half of a block's warps take a chunk, the others prepare the next.
#pragma once

#include "ops/cuda/channel_decay.cuh"
#include "ops/cuda/meet_warps.cuh"
#include "ops/cuda/prefill_chunk_block.cuh"

namespace replayssm::cuda {

template <class State, int kWarps>
class KimiWeights : protected ChunkBlock<Family::kKimiDelta, State, kWarps> {
 public:
  using Block = ChunkBlock<Family::kKimiDelta, State, kWarps>;
  using Block::Block;
  using Tile = typename Block::Tile;
  static constexpr int kBlocks = 1;  // at once

 protected:
  static constexpr int kState = Tile::kState, kTokens = Tile::kTokens;
  using Block::channel_products, Block::chunk_, Block::head_, Block::lane_, Block::me_, Block::p_,
      Block::prepared, Block::shared_, Block::stage, Block::token_, Block::warp_, Block::weights,
      Block::window_;

  template <class Prepare, class Take>
  __device__ void run_chunks(Prepare&& prepare, Take&& take) {
    if (window_ == 0) return;
    if (this->slot_ < 0) return this->clear();
    const int chunks = (window_ + kTokens - 1) / kTokens;
    if (threadIdx.x < Tile::kThreads) {
      this->load_state();
      for (chunk_ = 0; chunk_ < chunks; ++chunk_) {
        __syncthreads();
        take();
      }
      return this->store_state();
    }
    fetch(0);
    for (chunk_ = 0; chunk_ < chunks; ++chunk_) {
      if (warp_ == 0) this->keep_decays();
      keep_channels();
      copy_async_wait_but<0>();
      meet();
      if (chunk_ + 1 < chunks) fetch(chunk_ + 1);
      prepare();
      __syncthreads();
    }
  }
  __device__ static void meet() { meet_warps(1, Tile::kThreads); }
  __device__ void fetch(int chunk) {
    Block::fetch(chunk);
    this->next_gates(chunk);
    next_channels(chunk);
  }

  // Raw gates and decays: a warp has every kWarps-th token, a lane four columns.
  static constexpr int kWarpTokens = kTokens / kWarps;
  __device__ void next_channels(int chunk) {
    const auto* gate = static_cast<const Bf16*>(p_.gate) + int64_t{head_} * kState + 4 * lane_;
#pragma unroll
    for (int i = 0; i < kWarpTokens; ++i) {
      const int t = chunk * kTokens + warp_ + kWarps * i;
      if (t < window_)
        raw_[i] = *reinterpret_cast<const uint2*>(gate + (int64_t{token_} + t) * p_.gate_stride);
    }
  }
  // Tokens behind the window leave the state as it is.
  __device__ void keep_channels() {
    const float scale = p_.channel_gate.scale[head_], bound = p_.channel_gate.lower_bound;
    float bias[4];
    load_elements<float, 4>(p_.channel_gate.bias + int64_t{head_} * kState + 4 * lane_, bias);
#pragma unroll
    for (int i = 0; i < kWarpTokens; ++i) {
      const int t = warp_ + kWarps * i;
      float a[4];
      widen<Bf16>(raw_[i].x, a);
      widen<Bf16>(raw_[i].y, a + 2);
      const bool here = chunk_ * kTokens + t < window_;
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = here ? channel_decay(a[e], scale, bias[e], bound) : 1.0f;
      store_elements<float, 4>(channel_decays(t) + 4 * lane_, a);
    }
  }

  __device__ float* channel_decays(int token) const {
    return reinterpret_cast<float*>(shared_ + Tile::kChannelDecays) + token * kState;
  }

  __device__ void weigh_all() const {
    for (int n = warp_; n < 4 * Tile::kTokenTiles; n += kWarps) weigh_columns(n / 4, n % 4);
  }
  // Four columns of 16 tokens' weights: one begins in every four rows, and there are 34 weights of
  // each matrix whichever these are.
  __device__ static int column_of(int four, int i) {
    return i / 2 * 8 + (i % 2 > 0 ? 7 - four : four);
  }
  __device__ void weigh_columns(int tile, int four) const {
    float faded[4][4] = {};  // keys with the decays since
    weigh_rows<1>(tile, four, faded);
    weigh_rows<2>(tile, four, faded);
    weigh_rows<3>(tile, four, faded);
    weigh_rows<4>(tile, four, faded);
  }
  // The four rows in which the last of so many columns begins.
  template <int kColumns>
  __device__ void weigh_rows(int tile, int four, float (&faded)[4][4]) const {
    constexpr int kFirst = 4 * (kColumns - 1);
    const int token = tile * 16 + kFirst, begin = column_of(four, kColumns - 1);
    const Bf16* q = stage() + token * Tile::kKeyStride + 4 * lane_;
    float mine = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float a[4], query[4], key[4], sums[8] = {};
      load_elements<float, 4>(channel_decays(token + i) + 4 * lane_, a);
      load_elements<Bf16, 4>(q + i * Tile::kKeyStride, query);
      load_elements<Bf16, 4>(q + i * Tile::kKeyStride + Tile::kKeys, key);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          faded[c][e] *= a[e];
          if (c == kColumns - 1 && kFirst + i == begin) faded[c][e] = key[e];
          sums[c] = fmaf(query[e], faded[c][e], sums[c]);
          sums[4 + c] = fmaf(key[e], faded[c][e], sums[4 + c]);
        }
      const float sum = lane_sum<kColumns>(sums);
      if (lane_ % 4 == i) mine = sum;
    }
    keep_weight(token + lane_ % 4, tile * 16 + column_of(four, lane_ / 4 % 4), mine);
  }
  // The sum of x[lane / 4] over a warp's lanes; all but the first kColumns of both fours are zeros.
  template <int kColumns>
  __device__ float lane_sum(float (&x)[8]) const {
#pragma unroll
    for (int n = 4; n > 0; n /= 2) {
      // Of the upper lanes. Bits, no condition: nvcc makes it a branch around the exchange.
      const uint32_t upper = 0u - (lane_ / (4 * n) & 1u);
#pragma unroll
      for (int i = 0; i < min(n, kColumns); ++i) {
        const uint32_t low = __float_as_uint(x[i]), high = __float_as_uint(x[n + i]);
        const float kept = __uint_as_float((high & upper) | (low & ~upper));
        const float sent = __uint_as_float((low & upper) | (high & ~upper));
        x[i] = kept + __shfl_xor_sync(kAllLanes, sent, 4 * n);
      }
    }
    x[0] += __shfl_xor_sync(kAllLanes, x[0], 2);
    return x[0] + __shfl_xor_sync(kAllLanes, x[0], 1);
  }
  __device__ void keep_weight(int i, int j, float sum) const {
    const auto& decays = this->decays();
    const bool keys = lane_ >= 16;
    const float factor = keys ? decays.key[i] : decays.query[i];
    const float weight = keys && i == j ? 0.0f : sum * decays.strength[j] * factor;
    Bf16* to = weights(keys ? Tile::kOfKeys : Tile::kOfQueries) + i * Tile::kWeightStride + j % 16;
    const Bf16 high = from_float<Bf16>(weight);
    to[0] = high;
    to[Tile::kPart] = from_float<Bf16>(weight - to_float(high));
  }

  // A thread has two columns of eight tokens.
  __device__ void fade_keys() const {
    constexpr int kPairs = kState / 2;
    for (int n = me_; n < Tile::kTokenTiles * 2 * kPairs; n += Tile::kThreads)
      fade_columns(n / (2 * kPairs), n / kPairs % 2 * 8, n % kPairs * 2);
  }
  __device__ void fade_columns(int tile, int half, int column) const {
    const float* all = channel_decays(tile * 16) + column;
    const float* own = all + half * kState;
    float others[2] = {1, 1};
#pragma unroll
    for (int i = 0; i < 8; ++i) fade(others, all + (8 - half + i) * kState);
    const int at = (tile * 16 + half) * Tile::kKeyStride + column;
    uint32_t key[8];
    float decay[2] = {1, 1};
    if (half > 0) decay[0] = others[0], decay[1] = others[1];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Bf16* const q = stage() + at + i * Tile::kKeyStride;
      Bf16* const rest = prepared() + Tile::kRest + at + i * Tile::kKeyStride;
      key[i] = *reinterpret_cast<const uint32_t*>(q + Tile::kKeys);
      fade(decay, own + i * kState);
      keep_parts(*reinterpret_cast<const uint32_t*>(q), decay, q, rest);
      keep_parts(key[i], decay, q + Tile::kKeys, rest + Tile::kKeys);
    }
    if (half > 0) {
      store_elements<float, 2>(channel_products(tile) + column, decay);
      decay[0] = decay[1] = 1;
    } else {
      decay[0] = others[0], decay[1] = others[1];
    }
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      Bf16* const to = prepared() + Tile::kWritten + at + i * Tile::kKeyStride;
      keep_parts(key[i], decay, to, to + Tile::kKeys);
      fade(decay, own + i * kState);
    }
  }
  __device__ static void fade(float (&decay)[2], const float* by) {
    float x[2];
    load_elements<float, 2>(by, x);
    decay[0] *= x[0], decay[1] *= x[1];
  }
  // Two elements times their decays.
  __device__ static void keep_parts(uint32_t raw, const float (&decay)[2], Bf16* high, Bf16* low) {
    float x[2];
    widen<Bf16>(raw, x);
    const SplitPair split = split_pair(x[0] * decay[0], x[1] * decay[1]);
    *reinterpret_cast<uint32_t*>(high) = split.high;
    *reinterpret_cast<uint32_t*>(low) = split.low;
  }

 private:
  uint2 raw_[kWarpTokens] = {};  // gates of the chunk to come
};

}  // namespace replayssm::cuda
