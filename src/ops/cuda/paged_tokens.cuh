// One to eight new tokens per sequence over paged caches, on the tensor cores.
//
// Grid: (items, sequences), an item being a piece of a head's rows; every warp takes one and shares
// nothing with the others of its block. It starts the copies of its first rows as soon as it knows
// the slot. Queries (Gated Delta: and new keys) stay in registers as an instruction's 16 vectors;
// states, cached keys and new keys are rows that meet them:
//
//   r_t = P_t (a S q_t + sum_j w_j (k_j . q_t) v_j)                       j over the cached rows
//   o_t = r_t + sum_{i <= t} w_i D_it (k_i . q_t) v_i                     i over the new tokens
//
// where v_i is the token's own value, for Gated Delta d_i = beta_i (v_i - the same sum with k_i for
// q, over rows before i). A row that flushes is read like others; then its cached rows (single
// tokens: and its own) are folded into S where it lies in shared memory, and S is stored.
#pragma once

#include "ops/cuda/paged_tiles.cuh"

namespace replayssm::cuda {

template <replayssm_family kFamily, class Act, class State, int kState>
class PagedTokens {
 public:
  using Stream = PagedStream<State, kState>;
  using Map = QuadMap<State, kState>;
  using Vector = QuadVector<Act, Map>;
  static constexpr bool kDelta = kFamily != REPLAYSSM_MAMBA2;
  static constexpr int kElems = Map::kElems, kWords = Map::kWords;
  static constexpr int kRows = 4;   // consecutive ones of a pass, whose results a lane has
  static constexpr int kAhead = 2;  // tiles of eight cached rows whose values are loaded early

  __device__ PagedTokens(const PagedStep& p, const PagedLaunch& launch, const PagedItem& b,
                         const Stream& stream, int rows, float* shared)
      : p_(p),
        b_(b),
        stream_(stream),
        rows_(rows),
        tiles_((b.row.history + 7) / 8),
        token_(threadIdx.x % 32 / 4),
        quarter_(threadIdx.x % 4),
        mixing_(reinterpret_cast<float4*>(shared + launch.layout.mixing) + threadIdx.x % 32),
        weights_(shared + launch.layout.weights),
        decay_(shared + launch.layout.decay) {}

  __device__ void run() {
    PagedGateInputs inputs;
    inputs.load(p_, b_, b_.head, threadIdx.x % 32);
    Vector keys;
    if (live()) {
      queries_.load(fresh(p_.q), quarter_);
      keys.load(fresh(p_.k), quarter_);
    }
    Pass next;
    load(0, next);
    scale_vectors(keys);
    form_gates(inputs);
    __syncwarp();
    form_mixing(keys);
    if constexpr (kDelta) keys_ = keys;
    const int passes = (rows_ + kPagedTile - 1) / kPagedTile;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      const Pass now = next;
      if (pass + 1 < passes) load(pass + 1, next);
      stream_.take();
      float o[kRows], known[kRows], v[kRows];
      read(pass, now, o, known);
      finish(pass, now, o, known, v);
      if (folds()) fold(pass, now, v);
      stream_.release(pass);
    }
  }

 private:
  __device__ bool single() const { return p_.rule == REPLAYSSM_PAGED_SINGLE; }
  // Whether the new tokens go to the caches.
  __device__ bool keeps() const { return !single() || !b_.row.flushes; }
  __device__ bool folds() const { return b_.row.flushes && (single() || b_.row.history > 0); }
  __device__ bool live() const { return token_ < b_.row.window; }
  __device__ int place(int j) const { return b_.row.place(j, p_.ring, !single()); }
  // This lane's token's vector.
  __device__ const Act* fresh(const PagedValues& x) const {
    return at<Act>(x, b_.row.token + token_, b_.key_head);
  }
  __device__ const Act* cached_key(int j) const {
    return at<Act>(p_.cache_k, b_.row.slot, b_.key_head, place(j));
  }
  // Cached row of element e of this lane's pair of tile u.
  __device__ int cached_row(int u, int e) const { return 8 * u + 2 * quarter_ + e; }
  // Of the two rows of a pass that this lane brings to the products, the first; two below it is the
  // other. The first of those that it finishes.
  __device__ int brought_row() const { return token_ / 2 * 4 + token_ % 2; }
  __device__ int finished_row() const { return quarter_ * kRows; }

  // Values of a tile's cached rows in the rows that this lane brings; zeros where there are none.
  struct Values {
    Act v[2][2];  // of a pair of cached rows, in the two groups' rows
  };
  // What a lane needs for a pass besides the state.
  struct Pass {
    Values values[kAhead];
    Raw<Act, kRows> fresh;  // of this lane's token
    RawValue skip[kRows];
    RawFour z;
  };
  __device__ void load(int pass, Pass& x) const {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) load_values(pass, u, x.values[u]);
    const int row = pass * kPagedTile + finished_row();
    if (!live() || row >= rows_) return;
    const int64_t token = b_.row.token + token_;
    x.fresh.load(at<Act>(p_.v, token, b_.head) + b_.first_row + row);
    if constexpr (!kDelta) {
      const int64_t skip = b_.head * p_.skip.stride[0];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (p_.skip.data)
          x.skip[r].load(p_.skip, skip + (b_.first_row + row + r) * p_.skip.stride[1]);
      if (p_.z.data) x.z.load(p_.z, index(p_.z, token, b_.head) + b_.first_row + row);
    }
  }
  __device__ void load_values(int pass, int u, Values& x) const {
    const int row = pass * kPagedTile + brought_row();
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = cached_row(u, e);
      const bool valid = j < b_.row.history && row < rows_;
      const Act* from =
          at<Act>(p_.cache_v, b_.row.slot, b_.head, valid ? place(j) : 0) + b_.first_row + row;
#pragma unroll
      for (int g = 0; g < 2; ++g) x.v[e][g] = valid ? from[2 * g] : from_float<Act>(0.0f);
    }
  }

  // Windows go on with keys as they are cached.
  __device__ void scale_vectors(Vector& keys) {
    if constexpr (kDelta) {
      query_scale_ = p_.scale;
      float key_scale = 1;
      if (p_.normalise) {
        query_scale_ *= inverse_norm(queries_);
        key_scale = inverse_norm(keys);
      }
      if (single()) {
        key_scale_ = key_scale;
      } else {
        keys.multiply(key_scale);
      }
    }
    if (!b_.owns_keys || !live() || !keeps()) return;
    Act* const to = at<Act>(p_.cache_k, b_.row.slot, b_.key_head, place(b_.row.history + token_));
    keys.for_words([&](int w, float(&x)[kElems]) {
#pragma unroll
      for (int e = 0; e < kElems; ++e) x[e] *= key_scale_;
      store_elements<Act, kElems>(to + Map::element(w, quarter_), x);
    });
  }
  __device__ static float inverse_norm(const Vector& x) {
    float sum = 0;
    x.for_words([&](int, const float(&y)[kElems]) {
#pragma unroll
      for (int e = 0; e < kElems; ++e) sum = fmaf(y[e], y[e], sum);
    });
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    return rsqrtf(sum + 1e-6f);
  }

  // A lane for a token; then for this lane's token, and for the pair i of tokens before it.
  __device__ void form_gates(const PagedGateInputs& inputs) {
    const int lane = threadIdx.x % 32;
    const PagedHeadGates gates(p_, inputs);
    form_weights(p_, b_, gates, inputs.cached, b_.head, 0.0f, weights_, decay_);
    PagedGate own{0, 0, 0};
    float strength = 0;
    if (lane < b_.row.window) {
      own = gates.fresh(inputs.dt.read(p_.dt), !single());
      if constexpr (kDelta) strength = inputs.strength(p_);
      if (b_.owns_gates && keeps())
        *at<float>(p_.cache_g, b_.row.slot, b_.head, place(b_.row.history + lane)) = own.cached;
    }
    float all = 0, since[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kPagedTokens; ++i) {
      const float next = __shfl_sync(kAllLanes, own.log_decay, i);
      if (i > token_) continue;
      all += next;
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (i > 2 * quarter_ + e) since[e] += next;
    }
    prefix_ = expf(fminf(all, 0.0f));
    strength_ = __shfl_sync(kAllLanes, strength, token_);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float weight = __shfl_sync(kAllLanes, own.weight, 2 * quarter_ + e);
      within_[e] = 2 * quarter_ + e <= token_ ? weight * expf(fminf(since[e], 0.0f)) : 0.0f;
    }
  }

  // An instruction's vectors, of a pair of columns.
  __device__ static auto operand(const float (&q)[kElems], const float (&k)[kElems], int pair) {
    return PagedVectors<kIsWide<Act>>(
        float4{q[2 * pair], k[2 * pair], q[2 * pair + 1], k[2 * pair + 1]});
  }
  // Of all vectors with eight keys.
  __device__ PagedProducts multiply_keys(const Vector& vectors, const Vector& keys) const {
    PagedProducts products;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float q[kElems], k[kElems] = {}, x[kElems];
      queries_.words[w].read(q);
      if constexpr (kDelta) vectors.words[w].read(k);
      keys.words[w].read(x);
#pragma unroll
      for (int pair = 0; pair < kElems / 2; ++pair)
        products.add(operand(q, k, pair), PagedRows<kIsWide<Act>>(x[2 * pair], x[2 * pair + 1]));
    }
    return products;
  }

  // What cached values and new ones are multiplied with, but for factors of this lane's token.
  __device__ void form_mixing(const Vector& keys) {
    Vector next;
    load_keys(0, next);
    const PagedProducts own = multiply_keys(keys, keys);
    float with_q[2], with_k[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      with_q[e] = within_[e] * query_scale_ * key_scale_ * own.sum(e);
      with_k[e] = 2 * quarter_ + e < token_ ? within_[e] * own.sum(2 + e) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kPagedTokens; ++i) {
      const int from = token_ * 4 + i / 2;
      own_query_[i] = __shfl_sync(kAllLanes, with_q[i % 2], from);
      if constexpr (kDelta) own_key_[i] = __shfl_sync(kAllLanes, with_k[i % 2], from);
    }
#pragma unroll 1
    for (int u = 0; u < tiles_; ++u) {
      const Vector cached = next;
      load_keys(u + 1, next);
      const PagedProducts x = multiply_keys(keys, cached);
      float weight[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        weight[e] = cached_row(u, e) < b_.row.history ? weights_[cached_row(u, e)] : 0.0f;
      mixing_[u * 32] = {weight[0] * x.sum(0), weight[0] * x.sum(2), weight[1] * x.sum(1),
                         weight[1] * x.sum(3)};
    }
  }
  __device__ void load_keys(int u, Vector& keys) const {
    const int j = 8 * u + token_;
    if (j < b_.row.history) {
      keys.load(cached_key(j), quarter_);
    } else {
      keys = {};
    }
  }

  // What state and cached rows give for this lane's token.
  __device__ void read(int pass, const Pass& now, float (&o)[kRows], float (&known)[kRows]) const {
    PagedProducts state[2], cached[2];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float s[2][kElems], q[kElems], k[kElems] = {};
#pragma unroll
      for (int g = 0; g < 2; ++g) read_word(pass, g, w, s[g]);
      queries_.words[w].read(q);
      if constexpr (kDelta) keys_.words[w].read(k);
#pragma unroll
      for (int pair = 0; pair < kElems / 2; ++pair) {
        const auto vectors = operand(q, k, pair);
#pragma unroll
        for (int g = 0; g < 2; ++g)
          state[g].add(vectors, PagedRows<kIsWide<State>>(s[g][2 * pair], s[g][2 * pair + 1]));
      }
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (u < tiles_) add_cached(u, now.values[u], cached);
#pragma unroll 1
    for (int u = kAhead; u < tiles_; ++u) {
      Values values;
      load_values(pass, u, values);
      add_cached(u, values, cached);
    }
    const float decay = *decay_;
    const float query_factor = prefix_ * query_scale_, key_factor = prefix_ * key_scale_;
#pragma unroll
    for (int g = 0; g < 2; ++g)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        o[2 * g + e] = query_factor * fmaf(decay, state[g].sum(e), cached[g].sum(e));
        known[2 * g + e] = key_factor * fmaf(decay, state[g].sum(2 + e), cached[g].sum(2 + e));
      }
  }
  __device__ void read_word(int pass, int group, int w, float (&s)[kElems]) const {
    const uint4 word = stream_.word(pass, group, w);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      widen<State>(reinterpret_cast<const uint32_t*>(&word)[i], s + i * (kElems / 4));
  }
  __device__ void add_cached(int u, const Values& values, PagedProducts (&sums)[2]) const {
    const PagedVectors<true> mixing(mixing_[u * 32]);
#pragma unroll
    for (int g = 0; g < 2; ++g)
      sums[g].add(mixing,
                  PagedRows<kIsWide<Act>>(to_float(values.v[0][g]), to_float(values.v[1][g])));
  }

  // Token after token; v: the value of this lane's.
  __device__ void finish(int pass, const Pass& now, float (&o)[kRows], const float (&known)[kRows],
                         float (&v)[kRows]) const {
    now.fresh.read(v);
    if constexpr (kDelta) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) v[r] = strength_ * (v[r] - known[r]);
    }
#pragma unroll
    for (int i = 0; i < kPagedTokens; ++i) {
      if (i >= b_.row.window) break;
      const float correction = kDelta ? strength_ * own_key_[i] : 0.0f;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float x = __shfl_sync(kAllLanes, v[r], 4 * i + quarter_);
        o[r] = fmaf(own_query_[i], x, o[r]);
        if constexpr (kDelta) v[r] = fmaf(-correction, x, v[r]);
      }
    }
    const int row = pass * kPagedTile + finished_row();
    if (!live() || row >= rows_) return;
    if constexpr (!kDelta) finish_outputs(now, v, o);
    const int64_t token = b_.row.token + token_;
    set_four(p_.out, index(p_.out, token, b_.head) + b_.first_row + row, o);
    if (keeps())
      store_elements<Act, kRows>(
          at<Act>(p_.cache_v, b_.row.slot, b_.head, place(b_.row.history + token_)) + b_.first_row +
              row,
          v);
  }
  __device__ void finish_outputs(const Pass& now, const float (&v)[kRows],
                                 float (&o)[kRows]) const {
    float z[kRows];
    now.z.read(p_.z, z);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (p_.skip.data) o[r] = fmaf(v[r], now.skip[r].read(p_.skip), o[r]);
      if (p_.z.data) o[r] *= z[r] / (1.0f + __expf(-z[r]));
    }
  }

  // v: the new tokens' values.
  __device__ void fold(int pass, const Pass& now, const float (&v)[kRows]) const {
    const float factor = single() ? __shfl_sync(kAllLanes, prefix_, 0) : 1.0f;
    const float decay = factor * *decay_;
    float own[2];
    bring_own(v, own);
    __syncwarp();
#pragma unroll 1
    for (int w = 0; w < kWords; ++w) {
      PagedProducts sums[kElems / 2];
#pragma unroll
      for (int u = 0; u < kAhead; ++u)
        if (u < tiles_) add_writes(u, w, now.values[u], sums);
#pragma unroll 1
      for (int u = kAhead; u < tiles_; ++u) {
        Values values;
        load_values(pass, u, values);
        add_writes(u, w, values, sums);
      }
      float k[kElems] = {};
      if (single())
        load_elements<Act, kElems>(
            at<Act>(p_.k, b_.row.token, b_.key_head) + Map::element(w, quarter_), k);
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        float s[kElems];
        read_word(pass, g, w, s);
#pragma unroll
        for (int e = 0; e < kElems; ++e) {
          const float sum = fmaf(factor, sums[e / 2].sum(2 * g + e % 2), own[g] * k[e]);
          s[e] = fmaf(decay, s[e], sum);
        }
        store_elements<State, kElems>(&stream_.word(pass, g, w), s);
      }
    }
    stream_.store(pass);
  }
  // What a single token writes, in the rows that this lane brings; else zeros.
  __device__ void bring_own(const float (&v)[kRows], float (&own)[2]) const {
    const float weight = single() ? __shfl_sync(kAllLanes, within_[0] * key_scale_, 0) : 0.0f;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const float even = __shfl_sync(kAllLanes, v[2 * g], token_ / 2);
      const float odd = __shfl_sync(kAllLanes, v[2 * g + 1], token_ / 2);
      own[g] = weight * (token_ % 2 == 0 ? even : odd);
    }
  }
  // Adds a tile's weighted values times its keys, in all columns of word w: the values of 16 rows
  // are an instruction's vectors, columns its rows.
  __device__ void add_writes(int u, int w, const Values& values,
                             PagedProducts (&sums)[kElems / 2]) const {
    float4 write;
    float k[2][kElems];
    float v[2][2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = cached_row(u, e);
      const bool valid = j < b_.row.history;
      const float weight = valid ? weights_[j] : 0.0f;
#pragma unroll
      for (int g = 0; g < 2; ++g) v[e][g] = weight * to_float(values.v[e][g]);
      load_elements<Act, kElems>(cached_key(valid ? j : 0) + Map::element(w, token_ / 2), k[e]);
    }
    write = {v[0][0], v[0][1], v[1][0], v[1][1]};
    const PagedVectors<true> writes(write);
#pragma unroll
    for (int pair = 0; pair < kElems / 2; ++pair) {
      const int odd = token_ % 2;
      sums[pair].add(writes, PagedRows<kIsWide<Act>>(odd ? k[0][2 * pair + 1] : k[0][2 * pair],
                                                     odd ? k[1][2 * pair + 1] : k[1][2 * pair]));
    }
  }

  const PagedStep& p_;
  const PagedItem& b_;
  const Stream& stream_;
  const int rows_, tiles_;  // of this warp's item; of eight cached rows
  const int token_, quarter_;
  float4* const mixing_;  // this lane's
  float* const weights_;
  float* const decay_;
  Vector queries_{}, keys_{};  // of this lane's token
  float query_scale_ = 1, key_scale_ = 1, prefix_ = 1, strength_ = 0;
  float within_[2];  // decay and weight of a pair of new tokens in this lane's
  float own_query_[kPagedTokens], own_key_[kPagedTokens];  // the same, times products
};

template <replayssm_family kFamily, class Act, class State, int kState>
__global__ void __launch_bounds__(32 * kPagedWarps, 3)
    paged_tokens_kernel(const __grid_constant__ PagedStep p,
                        const __grid_constant__ PagedLaunch launch) {
  extern __shared__ __align__(256) char memory[];
  release_successor();
  wait_for_predecessor();
  const int warp = threadIdx.x / 32, item = blockIdx.x * launch.warps + warp;
  if (item >= launch.items(p)) return;
  const int64_t slot = paged_slot(p, blockIdx.y);
  float* const shared = reinterpret_cast<float*>(memory) + warp * launch.layout.total;
  const int head = item / launch.slices, first_row = (item - head * launch.slices) * launch.rows;
  const int rows = min(launch.rows, static_cast<int>(p.head_dim) - first_row);
  const PagedStream<State, kState> stream(
      at<State>(p.state, max(slot, int64_t{0}), head, first_row), p.state.stride[2], rows,
      shared + launch.layout.stream);
  if (slot >= 0) stream.start();
  const PagedItem b = paged_item(p, launch, item, slot);
  if (b.row.slot < 0 || (b.row.window <= 0 && !b.row.flushes)) {
    copy_async_wait_all();
    return pad_outputs(p, launch, b);
  }
  PagedTokens<kFamily, Act, State, kState>(p, launch, b, stream, rows, shared).run();
}

}  // namespace replayssm::cuda
