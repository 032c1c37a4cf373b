// What prompts in chunks of matrix products have in common, whatever the family: a block has rows
// of one head of a sequence, a warp 16 rows of the state, which stay in its registers from chunk to
// chunk.
//
// Within a chunk D_ij is the log decay from just after token j up to token i and L_i that from the
// chunk's start. D is a difference of sums in double: it may be small where they are not. Inputs
// are bfloat16; what else enters products does so as sums of two such numbers.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/prefill_chunk_rows.cuh"
#include "ops/cuda/prefill_chunk_tile.cuh"

namespace replayssm::cuda {

// Blocks: (heads and slices of their rows, sequences).
template <Family kFamily, class State, int kWarps>
class ChunkBlock : protected ChunkRows<ChunkTile<kFamily, kWarps>, State> {
 protected:
  using Rows = ChunkRows<ChunkTile<kFamily, kWarps>, State>;

 public:
  using Tile = ChunkTile<kFamily, kWarps>;
  using Decays = typename Tile::Decays;
  static constexpr bool kChannels = Tile::kChannels;
  static constexpr int kTokens = Tile::kTokens, kSpanTiles = Tile::kSpanTiles;
  static constexpr int kState = Tile::kState;

  __device__ ChunkBlock(const RecurrentPrefillParams& p, Bf16* shared)
      : Rows(p),
        shared_(shared),
        decays_(reinterpret_cast<Decays*>(shared + Tile::kEnd)),
        head_(static_cast<int>(blockIdx.x * Tile::kDim / p.shape.head_dim)),
        token_(p.batch.query_start[blockIdx.y]),
        window_(p.batch.query_start[blockIdx.y + 1] - token_) {}

 protected:
  using Rows::all_rows, Rows::first_row, Rows::kColumnTiles, Rows::lane_, Rows::load_state,
      Rows::me_, Rows::p_, Rows::row0, Rows::s_, Rows::slot_, Rows::store_state, Rows::warp_;
  using typename Rows::Factors, typename Rows::Pair, typename Rows::Split;

  // Calls take() for every chunk, when its inputs and decays are here.
  template <class Take>
  __device__ void run_chunks(Take&& take) {
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
      take();
    }
    store_state();
  }

  __device__ Bf16* stage() const { return shared_ + chunk_ % Tile::kStages * Tile::kStage; }
  __device__ Bf16* prepared() const {
    return shared_ + Tile::kStages * Tile::kStage +
           chunk_ % Tile::kPreparedChunks * Tile::kPrepared;
  }
  __device__ Bf16* weights(int matrix) const { return prepared() + matrix * Tile::kMatrix; }
  __device__ float* channel_products(int tile) const {
    return reinterpret_cast<float*>(prepared() + Tile::kProducts) + tile * kState;
  }
  __device__ const Decays& decays() const { return decays_[chunk_ & 1]; }

  // Tokens behind the window become zeros.
  __device__ void fetch(int chunk) const {
    constexpr int kKeyRuns = kState / 8, kValueRuns = Tile::kDim / 8;
    const int key_head = head_ / static_cast<int>(p_.shape.heads / p_.shape.key_heads);
    const auto* q = static_cast<const Bf16*>(p_.q) + int64_t{key_head} * kState;
    const auto* k = static_cast<const Bf16*>(p_.k) + int64_t{key_head} * kState;
    const auto* v = static_cast<const Bf16*>(p_.v) + first_row();
    Bf16* const to = shared_ + chunk % Tile::kStages * Tile::kStage;
    const int left = window_ - chunk * kTokens;
    const int64_t first = int64_t{token_} + chunk * kTokens;
#pragma unroll 2
    for (int i = me_; i < kTokens * kKeyRuns; i += Tile::kThreads) {
      const int t = i / kKeyRuns, column = i % kKeyRuns * 8;
      const int64_t token = t < left ? first + t : first;
      Bf16* const row = to + t * Tile::kKeyStride + column;
      copy_async_16_or_zero(row, q + token * p_.q_stride + column, t < left);
      copy_async_16_or_zero(row + Tile::kKeys, k + token * p_.k_stride + column, t < left);
    }
#pragma unroll 2
    for (int i = me_; i < kTokens * kValueRuns; i += Tile::kThreads) {
      const int t = i / kValueRuns, column = i % kValueRuns * 8;
      const int64_t token = t < left ? first + t : first;
      copy_async_16_or_zero(to + Tile::kValues + t * Tile::kValueStride + column,
                            v + token * p_.v_stride + column, t < left);
    }
    copy_async_commit();
  }

  // The first warp's lanes have as many tokens each.
  static constexpr int kLaneTokens = kTokens / 32;
  __device__ void next_gates(int chunk) {
    if (warp_ > 0) return;
    for (int i = 0; i < kLaneTokens; ++i) {
      const int t = chunk * kTokens + kLaneTokens * lane_ + i;
      const int64_t at = (int64_t{token_} + t) * p_.shape.heads + head_;
      strength_[i] = t < window_ ? p_.b[at] : 0.0f;
      decay_[i] = !kChannels && t < window_ ? p_.g[at] : 0.0f;
    }
  }
  __device__ void keep_decays() {
    double sum = 0;
    for (int i = 0; i < kLaneTokens; ++i) sum += decay_[i];
    for (int d = 1; d < 32; d *= 2) {
      const double other = __shfl_up_sync(kAllLanes, sum, d);
      if (lane_ >= d) sum += other;
    }
    const double all = __shfl_sync(kAllLanes, sum, 31);
    Decays& to = decays_[chunk_ & 1];
    for (int i = kLaneTokens - 1; i >= 0; --i) {
      const int t = kLaneTokens * lane_ + i;
      to.log[t] = sum;
      to.strength[t] = strength_[i];
      to.start[t] = expf(static_cast<float>(sum));
      to.end[t] = expf(static_cast<float>(all - sum)) * strength_[i];
      sum -= decay_[i];
    }
  }

  // Tile n of the lower ones, 16 by 16 tokens, of factor_i e^{D_ij} b_j (x_i . k_j), i >= j, or i >
  // j where that is `strict`.
  __device__ void weigh(const Bf16* x, int n, const float* factor, bool strict, Bf16* to) const {
    int it = 0, jt = n;
    while (jt > it) jt -= ++it;
    x += (it * 16 + lane_ % 16) * Tile::kKeyStride + lane_ / 16 * 8;
    const Bf16* k = stage() + Tile::kKeys +
                    (jt * 16 + lane_ / 16 * 8 + lane_ % 8) * Tile::kKeyStride + lane_ / 8 % 2 * 8;
    float product[2][4] = {};
#pragma unroll
    for (int c = 0; c < kState; c += 16) {
      uint32_t a[4], b[4];
      load_tiles(a, x + c);
      load_tiles(b, k + c);
      multiply_tile<Bf16>(product[0], a, b[0], b[1]);
      multiply_tile<Bf16>(product[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int i = it * 16 + lane_ / 4 + 8 * h, j = jt * 16 + column * 8 + lane_ % 4 * 2;
        float w[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool seen = strict ? i > j + e : i >= j + e;
          const double between = decays().log[i] - decays().log[j + e];
          const float decay = expf(seen ? static_cast<float>(between) : -INFINITY);
          const float weight = product[column][2 * h + e] * decays().strength[j + e] * decay;
          w[e] = seen ? (factor ? weight * factor[i] : weight) : 0.0f;
        }
        const SplitPair split = split_pair(w[0], w[1]);
        Bf16* at = to + i * Tile::kWeightStride + j;
        *reinterpret_cast<uint32_t*>(at) = split.high;
        *reinterpret_cast<uint32_t*>(at + Tile::kPart) = split.low;
      }
  }

  // Of rows of queries or keys: the first part, and what decays of columns leave behind it.
  struct Parts {
    const Bf16 *high, *low;
  };
  __device__ Parts queries() const { return {stage(), prepared() + Tile::kRest}; }
  // As the state is read and as it is written with them.
  __device__ Parts keys() const {
    return {stage() + Tile::kKeys, prepared() + Tile::kRest + Tile::kKeys};
  }
  __device__ Parts written_keys() const {
    if constexpr (!kChannels) return keys();
    return {prepared() + Tile::kWritten, prepared() + Tile::kWritten + Tile::kKeys};
  }

  // y = e^L S q of a span's tokens, from tile `first` on, and, for delta rules, u = S k.
  __device__ void read_state(int first, Pair (&y)[kSpanTiles], Pair* u = nullptr) const {
#pragma unroll
    for (int c = 0; c < kColumnTiles; c += 2) {
      const Split state(s_[c], s_[c + 1], {1, 1, 1, 1});
#pragma unroll
      for (int t = 0; t < kSpanTiles; ++t) {
        add_queries(y[t], state, (first + t) * 16, c * 8);
        if constexpr (is_delta(kFamily)) add_keys(u[t], state, (first + t) * 16, c * 8);
      }
    }
#pragma unroll
    for (int t = 0; t < kSpanTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = (first + t) * 16 + lane_ / 4 + 8 * half;
        const float start =
            decays().start[token] * (is_delta(kFamily) ? decays().query[token] : 1.0f);
#pragma unroll
        for (int h = 0; h < 2; ++h) y[t][h][2 * half] *= start, y[t][h][2 * half + 1] *= start;
      }
  }
  // 16 tokens and columns.
  __device__ void add_queries(Pair& y, const Split& state, int token, int column) const {
    const int at = (token + lane_ % 16) * Tile::kKeyStride + lane_ / 16 * 8 + column;
    uint32_t a[4];
    load_tiles(a, queries().high + at);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      multiply_tile<Bf16>(y[h], a, state.high[h], state.high[h + 2]);
      multiply_tile<Bf16>(y[h], a, state.low[h], state.low[h + 2]);
    }
    if constexpr (kChannels) {
      load_tiles(a, queries().low + at);
#pragma unroll
      for (int h = 0; h < 2; ++h) multiply_tile<Bf16>(y[h], a, state.high[h], state.high[h + 2]);
    }
  }
  __device__ void add_keys(Pair& u, const Split& state, int token, int column) const {
    const int at =
        (token + lane_ / 16 * 8 + lane_ % 8) * Tile::kKeyStride + lane_ / 8 % 2 * 8 + column;
    uint32_t b[4];
    load_tiles(b, keys().high + at);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      multiply_tile<Bf16>(u[n], state.high, b[2 * n], b[2 * n + 1]);
      multiply_tile<Bf16>(u[n], state.low, b[2 * n], b[2 * n + 1]);
    }
    if constexpr (kChannels) {
      load_tiles(b, keys().low + at);
#pragma unroll
      for (int n = 0; n < 2; ++n) multiply_tile<Bf16>(u[n], state.high, b[2 * n], b[2 * n + 1]);
    }
  }

  // o = (y + skip v) silu(z).
  __device__ void store_outputs(int first, const Pair (&y)[kSpanTiles]) const {
    const float skip = p_.skip ? p_.skip[head_] : 0.0f;
#pragma unroll
    for (int it = 0; it < kSpanTiles; ++it)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = (first + it) * 16 + lane_ / 4 + 8 * half, index = chunk_ * kTokens + t;
        if (index >= window_) continue;
        const int64_t token = int64_t{token_} + index;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = row0() + 8 * h + lane_ % 4 * 2;
          float o[2] = {y[it][h][2 * half], y[it][h][2 * half + 1]}, x[2];
          if (p_.skip) {
            load_elements<Bf16, 2>(stage() + Tile::kValues + t * Tile::kValueStride + row, x);
            o[0] = fmaf(skip, x[0], o[0]), o[1] = fmaf(skip, x[1], o[1]);
          }
          if (p_.z) {
            load_elements<Bf16, 2>(
                static_cast<const Bf16*>(p_.z) + token * p_.z_stride + first_row() + row, x);
            o[0] *= silu(x[0]), o[1] *= silu(x[1]);
          }
          store_pair(p_.o, p_.o_dtype, token * all_rows() + first_row() + row, o);
        }
      }
  }

  // A chunk's values of 16 tokens.
  __device__ void load_values(int jt, Pair& v) const {
    uint32_t raw[4];
    load_tiles_transposed(raw, stage() + Tile::kValues +
                                   (jt * 16 + lane_ / 16 * 8 + lane_ % 8) * Tile::kValueStride +
                                   row0() + lane_ / 8 % 2 * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) widen<Bf16>(raw[i], v[i / 2] + i % 2 * 2);
  }

  // S <- e^{L_n} S + sum_j e^{D_nj} b_j u_j k_j^T over a span's tokens, with
  // written(t, factor) the u of the t-th 16 tokens times their factors.
  template <class Written>
  __device__ void update_state(int first, Written&& written) {
    fade_state(first);
    const int at = (lane_ / 8 % 2 * 8 + lane_ % 8) * Tile::kKeyStride + lane_ / 16 * 8 +
                   first * 16 * Tile::kKeyStride;
#pragma unroll
    for (int t = 0; t < kSpanTiles; ++t) {
      const float* end = decays().end + (first + t) * 16 + lane_ % 4 * 2;
      const Factors factor = {end[0], end[1], end[8], end[9]};
      const Split a = written(t, factor);
#pragma unroll
      for (int c = 0; c < kColumnTiles; c += 2) {
        const int key = at + t * 16 * Tile::kKeyStride + c * 8;
        uint32_t b[4];
        load_tiles_transposed(b, written_keys().high + key);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          multiply_tile<Bf16>(s_[c + n], a.high, b[2 * n], b[2 * n + 1]);
          multiply_tile<Bf16>(s_[c + n], a.low, b[2 * n], b[2 * n + 1]);
        }
        if constexpr (kChannels) {
          load_tiles_transposed(b, written_keys().low + key);
#pragma unroll
          for (int n = 0; n < 2; ++n)
            multiply_tile<Bf16>(s_[c + n], a.high, b[2 * n], b[2 * n + 1]);
        }
      }
    }
  }
  __device__ void fade_state(int first) {
    float all[2] = {decays().start[kTokens - 1], decays().start[kTokens - 1]};
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      if constexpr (kChannels)
        load_elements<float, 2>(channel_products(first) + c * 8 + lane_ % 4 * 2, all);
#pragma unroll
      for (int i = 0; i < 4; ++i) s_[c][i] *= all[i % 2];
    }
  }

  __device__ void clear() const {
    const float zero = 0;
    for (int i = me_; i < window_ * Tile::kDim; i += Tile::kThreads) {
      const int64_t token = int64_t{token_} + i / Tile::kDim;
      store_run<1>(p_.o, p_.o_dtype, token * all_rows() + first_row() + i % Tile::kDim, &zero);
    }
  }

  Bf16* const shared_;
  Decays* const decays_;
  const int head_, token_, window_;
  int chunk_ = 0;
  float strength_[kLaneTokens], decay_[kLaneTokens];  // of the chunk to come
};

}  // namespace replayssm::cuda
