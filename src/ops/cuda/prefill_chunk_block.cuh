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
#include "ops/cuda/mma.cuh"
#include "ops/cuda/reduce.cuh"
#include "replayssm/ops.h"

namespace replayssm::cuda {

// kMatrices: of weights among a chunk's tokens.
template <int kWarps, int kMatrices>
struct ChunkTile {
  static constexpr int kTokens = 64, kTokenTiles = kTokens / 16, kState = 128, kDim = 16 * kWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kLowerTiles = kTokenTiles * (kTokenTiles + 1) / 2;  // of such a matrix
  // Rows of eight lanes meet no bank twice.
  static constexpr int kKeyStride = kState + 8, kValueStride = kDim + 8,
                       kWeightStride = kTokens + 8;

  // Shared memory, in 16-bit elements: two stages of queries, keys, values; the weights' parts.
  static constexpr int kKeys = kTokens * kKeyStride, kValues = 2 * kKeys,
                       kStage = kValues + kTokens * kValueStride, kWeights = 2 * kStage,
                       kPart = kTokens * kWeightStride, kMatrix = 2 * kPart,
                       kEnd = kWeights + kMatrices * kMatrix;
  // Then two of these, of one chunk and the next.
  struct Decays {
    double log[kTokens];      // L
    float strength[kTokens];  // b
    float start[kTokens];     // e^L
    float end[kTokens];       // e^{D_n} b
    float key[kTokens];       // what the delta rule multiplies keys
    float query[kTokens];     // and queries by
  };
  static constexpr int kBytes = kEnd * 2 + 2 * int(sizeof(Decays));
};

// Blocks: (heads and slices of their rows, sequences).
template <class State, int kWarps, int kMatrices>
class ChunkBlock {
 public:
  using Tile = ChunkTile<kWarps, kMatrices>;
  using Decays = typename Tile::Decays;
  static constexpr int kTokens = Tile::kTokens, kTokenTiles = Tile::kTokenTiles;
  static constexpr int kState = Tile::kState, kColumnTiles = kState / 8;

  __device__ ChunkBlock(const RecurrentPrefillParams& p, Bf16* shared)
      : p_(p),
        shared_(shared),
        decays_(reinterpret_cast<Decays*>(shared + Tile::kEnd)),
        me_(static_cast<int>(threadIdx.x)),
        lane_(me_ % 32),
        warp_(me_ / 32),
        head_(static_cast<int>(blockIdx.x * Tile::kDim / p.shape.head_dim)),
        slot_(p.batch.slot[blockIdx.y]),
        token_(p.batch.query_start[blockIdx.y]),
        window_(p.batch.query_start[blockIdx.y + 1] - token_) {}

 protected:
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

  // The first of this block's rows, of all heads'.
  __device__ static int64_t first_row() { return int64_t{blockIdx.x} * Tile::kDim; }
  __device__ int64_t all_rows() const { return p_.shape.heads * p_.shape.head_dim; }
  __device__ Bf16* weights(int matrix) const {
    return shared_ + Tile::kWeights + matrix * Tile::kMatrix;
  }
  __device__ const Bf16* stage() const { return shared_ + (chunk_ & 1) * Tile::kStage; }
  __device__ const Decays& decays() const { return decays_[chunk_ & 1]; }
  // The first of this warp's rows.
  __device__ int row0() const { return warp_ * 16; }

  // Tokens behind the window become zeros.
  __device__ void fetch(int chunk) const {
    constexpr int kKeyRuns = kState / 8, kValueRuns = Tile::kDim / 8;
    const int key_head = head_ / static_cast<int>(p_.shape.heads / p_.shape.key_heads);
    const auto* q = static_cast<const Bf16*>(p_.q) + int64_t{key_head} * kState;
    const auto* k = static_cast<const Bf16*>(p_.k) + int64_t{key_head} * kState;
    const auto* v = static_cast<const Bf16*>(p_.v) + first_row();
    Bf16* const to = shared_ + (chunk & 1) * Tile::kStage;
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

  // The first warp's lanes have two tokens each.
  __device__ void next_gates(int chunk) {
    if (warp_ > 0) return;
    for (int i = 0; i < 2; ++i) {
      const int t = chunk * kTokens + 2 * lane_ + i;
      const int64_t at = (int64_t{token_} + t) * p_.shape.heads + head_;
      strength_[i] = t < window_ ? p_.b[at] : 0.0f;
      decay_[i] = t < window_ ? p_.g[at] : 0.0f;
    }
  }
  __device__ void keep_decays() {
    double sum = double{decay_[0]} + decay_[1];
    for (int d = 1; d < 32; d *= 2) {
      const double other = __shfl_up_sync(kAllLanes, sum, d);
      if (lane_ >= d) sum += other;
    }
    const double all = __shfl_sync(kAllLanes, sum, 31);
    Decays& to = decays_[chunk_ & 1];
    for (int i = 0; i < 2; ++i) {
      const double log = i == 1 ? sum : sum - decay_[1];
      to.log[2 * lane_ + i] = log;
      to.strength[2 * lane_ + i] = strength_[i];
      to.start[2 * lane_ + i] = expf(static_cast<float>(log));
      to.end[2 * lane_ + i] = expf(static_cast<float>(all - log)) * strength_[i];
    }
  }

  // Element (row, column) of a state in a warp's registers: tile column / 8, that of the lane.
  __device__ int64_t state_row(int half) const {
    return slot_ * all_rows() + first_row() + row0() + lane_ / 4 + 8 * half;
  }
  __device__ void load_state() {
    const auto* state = static_cast<const State*>(p_.state.checkpoint);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      for (int c = 0; c < kColumnTiles; ++c) {
        const State* from = state + state_row(h) * kState + c * 8 + lane_ % 4 * 2;
        s_[c][2 * h] = to_float(from[0]);
        s_[c][2 * h + 1] = to_float(from[1]);
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

  // y = e^L S q factor, if there is one: rows of tokens, columns of this warp's rows.
  __device__ void read_state(float (&y)[kTokenTiles][2][4], const float* factor) const {
    const Bf16* q = stage() + lane_ % 16 * Tile::kKeyStride + lane_ / 16 * 8;
#pragma unroll
    for (int c = 0; c < kColumnTiles; c += 2) {
      SplitPair b[2][2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int n = 0; n < 2; ++n) b[h][n] = split_pair(s_[c + n][2 * h], s_[c + n][2 * h + 1]);
#pragma unroll
      for (int it = 0; it < kTokenTiles; ++it) {
        uint32_t a[4];
        load_tiles(a, q + it * 16 * Tile::kKeyStride + c * 8);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          multiply_tile<Bf16>(y[it][h], a, b[h][0].high, b[h][1].high);
          multiply_tile<Bf16>(y[it][h], a, b[h][0].low, b[h][1].low);
        }
      }
    }
#pragma unroll
    for (int it = 0; it < kTokenTiles; ++it)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = it * 16 + lane_ / 4 + 8 * half;
        const float start = decays().start[t] * (factor ? factor[t] : 1.0f);
#pragma unroll
        for (int h = 0; h < 2; ++h) y[it][h][2 * half] *= start, y[it][h][2 * half + 1] *= start;
      }
  }

  // o = (y + skip v) silu(z).
  __device__ void store_outputs(const float (&y)[kTokenTiles][2][4]) const {
    const float skip = p_.skip ? p_.skip[head_] : 0.0f;
#pragma unroll
    for (int it = 0; it < kTokenTiles; ++it)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = it * 16 + lane_ / 4 + 8 * half, index = chunk_ * kTokens + t;
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

  // [16 rows, 16 tokens] as accumulators.
  using Pair = float[2][4];

  // A chunk's values of 16 tokens.
  __device__ void load_values(int jt, Pair& v) const {
    uint32_t raw[4];
    load_tiles_transposed(raw, stage() + Tile::kValues +
                                   (jt * 16 + lane_ / 16 * 8 + lane_ % 8) * Tile::kValueStride +
                                   row0() + lane_ / 8 % 2 * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) widen<Bf16>(raw[i], v[i / 2] + i % 2 * 2);
  }

  // Left operand of a product: rows of the warp, 16 columns.
  using Factors = float[4];  // of a lane's columns
  struct Split {
    uint32_t high[4], low[4];
    __device__ Split(const float (&left)[4], const float (&right)[4], const Factors& factor) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = (i < 2 ? left : right) + i % 2 * 2;
        const float* f = factor + i / 2 * 2;
        const SplitPair pair = split_pair(x[0] * f[0], x[1] * f[1]);
        high[i] = pair.high, low[i] = pair.low;
      }
    }
  };

  // S <- e^{L_n} S + sum_j e^{D_nj} b_j u_j k_j^T, with written(jt, factor) the u of 16 tokens
  // times their factors.
  template <class Written>
  __device__ void update_state(Written&& written) {
    const float all = decays().start[kTokens - 1];
#pragma unroll
    for (auto& tile : s_)
#pragma unroll
      for (float& x : tile) x *= all;
    const Bf16* k =
        stage() + Tile::kKeys + (lane_ / 8 % 2 * 8 + lane_ % 8) * Tile::kKeyStride + lane_ / 16 * 8;
#pragma unroll
    for (int jt = 0; jt < kTokenTiles; ++jt) {
      const float* end = decays().end + jt * 16 + lane_ % 4 * 2;
      const Factors factor = {end[0], end[1], end[8], end[9]};
      const Split a = written(jt, factor);
#pragma unroll
      for (int c = 0; c < kColumnTiles; c += 2) {
        uint32_t b[4];
        load_tiles_transposed(b, k + jt * 16 * Tile::kKeyStride + c * 8);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          multiply_tile<Bf16>(s_[c + n], a.high, b[2 * n], b[2 * n + 1]);
          multiply_tile<Bf16>(s_[c + n], a.low, b[2 * n], b[2 * n + 1]);
        }
      }
    }
  }

  // Checkpoint and read copy.
  __device__ void store_state() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      store_row(static_cast<State*>(p_.state.checkpoint), h, 1, 0);
      const ReadCopy& copy = p_.state.read_copy;
      if (copy.data == nullptr) continue;
      if (copy.dtype == DType::kFloat16) store_row(static_cast<Fp16*>(copy.data), h, 1, 0);
      if (copy.dtype == DType::kBFloat16) store_row(static_cast<Bf16*>(copy.data), h, 1, 0);
      if (dtype_bytes(copy.dtype) > 1) continue;
      float most = 0;
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
        most = fmaxf(most, fmaxf(fabsf(s_[c][2 * h]), fabsf(s_[c][2 * h + 1])));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      float scale = most / dtype_max_8bit(copy.dtype);
      if (scale < 0x1p-126f) scale = 0;
      const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
      if (copy.dtype == DType::kInt8) {
        store_row(static_cast<Int8*>(copy.data), h, inverse, scale);
      } else {
        store_row(static_cast<Fp8*>(copy.data), h, inverse, scale);
      }
      if (lane_ % 4 == 0) copy.scale[state_row(h)] = scale;
    }
  }
  // scale, inverse: of 8-bit rows.
  template <class T>
  __device__ void store_row(T* base, int h, float inverse, float scale) const {
    T* to = base + state_row(h) * kState + lane_ % 4 * 2;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      float x[4] = {s_[c][2 * h], s_[c][2 * h + 1]};
      if constexpr (kIs8Bit<T>) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float q = x[e] * inverse;  // a quotient is this and a correction
          x[e] = fmaf(fmaf(-q, scale, x[e]), inverse, q);
        }
        *reinterpret_cast<uint16_t*>(to + c * 8) = static_cast<uint16_t>(narrow<T>(x));
      } else {
        to[c * 8] = from_float<T>(x[0]);
        to[c * 8 + 1] = from_float<T>(x[1]);
      }
    }
  }

  __device__ void clear() const {
    const float zero = 0;
    for (int i = me_; i < window_ * Tile::kDim; i += Tile::kThreads) {
      const int64_t token = int64_t{token_} + i / Tile::kDim;
      store_run<1>(p_.o, p_.o_dtype, token * all_rows() + first_row() + i % Tile::kDim, &zero);
    }
  }

  const RecurrentPrefillParams& p_;
  Bf16* const shared_;
  Decays* const decays_;
  const int me_, lane_, warp_, head_, slot_, token_, window_;
  int chunk_ = 0;
  float strength_[2], decay_[2];  // of the chunk to come
  float s_[kColumnTiles][4];
};

}  // namespace replayssm::cuda
