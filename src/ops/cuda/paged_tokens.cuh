// One to eight new tokens per sequence over paged caches, on the tensor cores.
//
// Grid: (items, sequences), a block being a warp that takes a piece of a head's rows, or several
// heads of a key head. It starts the copies of its first rows as soon as it knows the slot. Queries
// (Gated Delta: and new keys) stay in registers as an instruction's 16 vectors; states, cached keys
// and new keys are rows that meet them:
//
//   r_t = P_t (a S q_t + sum_j w_j (k_j . q_t) v_j)                       j over the cached rows
//   o_t = r_t + sum_{i <= t} w_i D_it (k_i . q_t) v_i                     i over the new tokens
//
// where v_i is the token's own value, for Gated Delta d_i = beta_i (v_i - the same sum with k_i for
// q, over rows before i). A row that flushes is read like others; then its cached rows (single
// tokens: and its own) are folded into S where it lies in shared memory, and S is stored.
#pragma once

#include "ops/cuda/paged_fold.cuh"
#include "ops/cuda/paged_token_gates.cuh"

namespace replayssm::cuda {

// Warps of a multiprocessor, as registers and shared memory allow.
template <replayssm_family kFamily, class State, int kState>
constexpr int paged_token_warps() {
  return kFamily == REPLAYSSM_MAMBA2 && kIsWide<State> && kState == 128 ? 12 : 8;
}

template <replayssm_family kFamily, class Act, class State, int kState>
class PagedTokens {
 public:
  static constexpr bool kDelta = kFamily != REPLAYSSM_MAMBA2;
  using Stream = PagedStream<Act, State, kState>;
  using Map = QuadMap<State, kState>;
  using Vector = QuadVector<Act, Map>;
  using Fresh = PagedFresh<Act, Map>;
  using Products = std::conditional_t<kDelta, float4, float2>;
  static constexpr int kFoldParts = kDelta ? 2 : 4;
  using Fold = PagedFold<Act, State, kState, kFoldParts>;
  static constexpr int kElems = Map::kElems, kWords = Map::kWords;
  static constexpr int kRows = 4;  // consecutive ones of a pass, whose results a lane has
  static constexpr int kStaged = Fold::kStaged;  // tiles of eight cached rows that are copied

  // stream: its states are on their way.
  __device__ PagedTokens(const PagedStep& p, const PagedLaunch& launch, const PagedItem& b,
                         const Fresh& fresh, Stream& stream, float* shared)
      : p_(p),
        b_(b),
        stream_(stream),
        heads_(launch.heads),
        tiles_((b.row.history + 7) / 8),
        token_(threadIdx.x % 32 / 4),
        quarter_(threadIdx.x % 4),
        products_(reinterpret_cast<Products*>(shared + launch.layout.products) + threadIdx.x % 32),
        weights_(shared + launch.layout.weights),
        decay_(shared + launch.layout.decay),
        fresh_(fresh) {}

  __device__ void run() {
    stream_.start_values(p_, b_, !single());
    PagedGateInputs inputs;
    inputs.load(p_, b_, b_.head, threadIdx.x % 32);
    Vector cached;
    load_keys(0, cached);
    scale_vectors();
    const float4 own = multiply_keys(fresh_.key);
    multiply_cached(cached);
    const int passes = (b_.rows + kPagedTile - 1) / kPagedTile;
    int first = 0;
#pragma unroll 1
    for (head_ = b_.head; head_ < b_.head + heads_; ++head_, first += passes) {
      gates_.form<kDelta>(p_, b_, inputs, head_, keeps(), weights_, decay_);
      if (head_ + 1 < b_.head + heads_) inputs.load(p_, b_, head_ + 1, threadIdx.x % 32);
      __syncwarp();
      form_own(own);
      find_results();
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) run(first + pass, pass * kPagedTile);
      __syncwarp();
    }
  }

 private:
  // Single tokens have a kernel of their own where rows have 128 elements.
  __device__ bool single() const { return kState != 128 && p_.rule == REPLAYSSM_PAGED_SINGLE; }
  // Whether the new tokens go to the caches.
  __device__ bool keeps() const { return !single() || !b_.row.flushes; }
  __device__ bool folds() const { return b_.row.flushes && (single() || b_.row.history > 0); }
  __device__ bool live() const { return token_ < b_.row.window; }
  __device__ int place(int j) const { return b_.row.place(j, p_.ring, !single()); }
  __device__ const Act* cached_key(int j) const {
    return at<Act>(p_.cache_k, b_.row.slot, b_.key_head, place(j));
  }
  // Cached row of element e of this lane's pair of tile u.
  __device__ int cached_row(int u, int e) const { return 8 * u + 2 * quarter_ + e; }
  __device__ float cached_weight(int u, int e) const {
    return cached_row(u, e) < b_.row.history ? weights_[cached_row(u, e)] : 0.0f;
  }

  // pass: of the stream; row: its first in the head's piece.
  __device__ void run(int pass, int row) {
    PagedFinishFour x;
    if (!kDelta && finishes(row))
      x.load(p_, b_.row.token + token_, head_, b_.first_row + row + quarter_ * kRows);
    Fold fold(p_, b_, !single(), weights_);
    if (folds()) fold.load_keys();
    stream_.take(pass);
    float o[kRows], known[kRows], v[kRows];
    read(pass, row, o, known);
    finish(pass, row, x, known, o, v);
    if (folds()) run(fold, pass, row, v);
    stream_.release(pass);
  }

  // Windows go on with keys as they are cached.
  __device__ void scale_vectors() {
    Vector& key = fresh_.key;
    if constexpr (kDelta) {
      query_scale_ = p_.scale;
      if (p_.normalise) {
        query_scale_ *= inverse_norm(fresh_.query);
        key_scale_ = inverse_norm(key);
      }
    }
    Vector as_cached = key;
    if constexpr (kDelta) {
      as_cached.multiply(key_scale_);
      if (!single()) {
        key = as_cached;
        key_scale_ = 1;
      }
    }
    if (b_.owns_keys && live() && keeps())
      as_cached.store(at<Act>(p_.cache_k, b_.row.slot, b_.key_head, place(b_.row.history + token_)),
                      quarter_);
  }
  __device__ static float inverse_norm(const Vector& x) {
    float sum[2] = {0, 0};
    x.for_words([&](int, const float(&y)[kElems]) {
#pragma unroll
      for (int e = 0; e < kElems; ++e) sum[e % 2] = fmaf(y[e], y[e], sum[e % 2]);
    });
    sum[0] += sum[1];
    sum[0] += __shfl_xor_sync(kAllLanes, sum[0], 1);
    sum[0] += __shfl_xor_sync(kAllLanes, sum[0], 2);
    return rsqrtf(sum[0] + 1e-6f);
  }

  // An instruction's vectors, of a pair of columns.
  __device__ static auto operand(const float (&q)[kElems], const float (&k)[kElems], int pair) {
    return PagedVectors<kIsWide<Act>>(
        float4{q[2 * pair], k[2 * pair], q[2 * pair + 1], k[2 * pair + 1]});
  }
  // Word w of this lane's vectors.
  __device__ void read_vectors(int w, float (&q)[kElems], float (&k)[kElems]) const {
    fresh_.query.words[w].read(q);
    if constexpr (kDelta) {
      fresh_.key.words[w].read(k);
    } else {
#pragma unroll
      for (int e = 0; e < kElems; ++e) k[e] = 0;
    }
  }
  // Of all vectors with eight keys: of each of this lane's pair that of the query, then that of the
  // new key.
  __device__ float4 multiply_keys(const Vector& keys) const {
    PagedProducts products;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float q[kElems], k[kElems], x[kElems];
      read_vectors(w, q, k);
      keys.words[w].read(x);
#pragma unroll
      for (int pair = 0; pair < kElems / 2; ++pair)
        products.add(operand(q, k, pair), PagedRows<kIsWide<Act>>(x[2 * pair], x[2 * pair + 1]));
    }
    return {products.sum(0), products.sum(2), products.sum(1), products.sum(3)};
  }

  __device__ void form_own(const float4& own) {
    float with_q[2] = {own.x, own.z}, with_k[2] = {own.y, own.w};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      with_q[e] *= gates_.within[e] * query_scale_ * key_scale_;
      with_k[e] = 2 * quarter_ + e < token_ ? with_k[e] * gates_.strength * gates_.within[e] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kPagedTokens; ++i) {
      if (i >= b_.row.window) break;
      const int from = token_ * 4 + i / 2;
      own_query_[i] = __shfl_sync(kAllLanes, with_q[i % 2], from);
      if constexpr (kDelta) own_key_[i] = __shfl_sync(kAllLanes, with_k[i % 2], from);
    }
  }
  __device__ void multiply_cached(Vector& cached) const {
#pragma unroll 1
    for (int u = 0; u < tiles_; ++u) {
      const float4 x = multiply_keys(cached);
      if constexpr (kDelta) {
        products_[u * 32] = x;
      } else {
        products_[u * 32] = {x.x, x.z};
      }
      load_keys(u + 1, cached);
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

  // Where this lane's results go.
  __device__ void find_results() {
    const int row = b_.first_row + quarter_ * kRows;
    out_ = index(p_.out, b_.row.token + token_, head_) + row;
    kept_ = at<Act>(p_.cache_v, b_.row.slot, head_, place(b_.row.history + token_)) + row;
  }
  __device__ bool finishes(int row) const { return live() && row + quarter_ * kRows < b_.rows; }

  // Values of this lane's pair of a tile's cached rows, in the two rows of the pass that it brings
  // to the products: one of each group of eight.
  __device__ void load_values(int pass, int row, int u, typename Fold::Pair& v) const {
    const int four = token_ / 2;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = cached_row(u, e);
      float x[4] = {};
      if (u < kStaged) {
        load_elements<Act, 4>(stream_.cached(pass, j, four), x);
      } else if (j < b_.row.history && row + 4 * four < b_.rows) {
        load_elements<Act, 4>(
            at<Act>(p_.cache_v, b_.row.slot, head_, place(j)) + b_.first_row + row + 4 * four, x);
      }
#pragma unroll
      for (int g = 0; g < 2; ++g) v[e][g] = token_ % 2 == 0 ? x[2 * g] : x[2 * g + 1];
    }
  }

  // What state and cached rows give for this lane's token.
  __device__ void read(int pass, int row, float (&o)[kRows], float (&known)[kRows]) const {
    PagedProducts state[2], cached[2];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float s[2][kElems], q[kElems], k[kElems];
#pragma unroll
      for (int g = 0; g < 2; ++g) read_word(pass, g, w, s[g]);
      read_vectors(w, q, k);
#pragma unroll
      for (int pair = 0; pair < kElems / 2; ++pair) {
        const auto vectors = operand(q, k, pair);
#pragma unroll
        for (int g = 0; g < 2; ++g)
          state[g].add(vectors, PagedRows<kIsWide<State>>(s[g][2 * pair], s[g][2 * pair + 1]));
      }
    }
#pragma unroll
    for (int u = 0; u < kStaged; ++u)
      if (u < tiles_) add_cached(pass, row, u, cached);
#pragma unroll 1
    for (int u = kStaged; u < tiles_; ++u) add_cached(pass, row, u, cached);
    const float decay = *decay_;
    const float query_factor = gates_.prefix * query_scale_,
                key_factor = gates_.prefix * key_scale_;
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
  __device__ void add_cached(int pass, int row, int u, PagedProducts (&sums)[2]) const {
    const Products x = products_[u * 32];
    const float weight[2] = {cached_weight(u, 0), cached_weight(u, 1)};
    float4 mixing{weight[0] * x.x, 0, weight[1] * x.y, 0};
    if constexpr (kDelta)
      mixing = {weight[0] * x.x, weight[0] * x.y, weight[1] * x.z, weight[1] * x.w};
    const PagedVectors<true> vectors(mixing);
    typename Fold::Pair v;
    load_values(pass, row, u, v);
#pragma unroll
    for (int g = 0; g < 2; ++g) sums[g].add(vectors, PagedRows<kIsWide<Act>>(v[0][g], v[1][g]));
  }

  // Token after token; v: the value of this lane's.
  __device__ void finish(int pass, int row, const PagedFinishFour& x, const float (&known)[kRows],
                         float (&o)[kRows], float (&v)[kRows]) const {
    load_elements<Act, kRows>(stream_.fresh(pass, token_, quarter_), v);
    if constexpr (kDelta) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) v[r] = gates_.strength * (v[r] - known[r]);
    }
#pragma unroll
    for (int i = 0; i < kPagedTokens; ++i) {
      if (i >= b_.row.window) break;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float other = __shfl_sync(kAllLanes, v[r], 4 * i + quarter_);
        o[r] = fmaf(own_query_[i], other, o[r]);
        if constexpr (kDelta) v[r] = fmaf(-own_key_[i], other, v[r]);
      }
    }
    if (!finishes(row)) return;
    if constexpr (!kDelta) x.apply(p_, v, o);
    set_four(p_.out, out_ + row, o);
    if (keeps()) store_elements<Act, kRows>(kept_ + row, v);
  }
  // v: the new tokens' values.
  __device__ void run(Fold& fold, int pass, int row, const float (&v)[kRows]) const {
    const float factor = single() ? __shfl_sync(kAllLanes, gates_.prefix, 0) : 1.0f;
    float own[2];
    bring_own(v, own);
    const auto values = [&](int u, typename Fold::Pair& x) { load_values(pass, row, u, x); };
    fold.weigh(factor, values);
    __syncwarp();
    const Act* const key = single() ? at<Act>(p_.k, b_.row.token, b_.key_head) : nullptr;
#pragma unroll
    for (int part = 0; part < kFoldParts; ++part)
      fold.run(part, *decay_, factor, own, key, values,
               [&](int g, int w) -> uint4& { return stream_.word(pass, g, w); });
    stream_.store(pass);
  }
  // What a single token writes, in the rows that this lane brings; else zeros.
  __device__ void bring_own(const float (&v)[kRows], float (&own)[2]) const {
    const float weight = single() ? __shfl_sync(kAllLanes, gates_.within[0] * key_scale_, 0) : 0.0f;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const float even = __shfl_sync(kAllLanes, v[2 * g], token_ / 2);
      const float odd = __shfl_sync(kAllLanes, v[2 * g + 1], token_ / 2);
      own[g] = single() ? weight * (token_ % 2 == 0 ? even : odd) : 0.0f;
    }
  }

  const PagedStep& p_;
  const PagedItem& b_;
  Stream& stream_;
  const int heads_, tiles_;  // tiles of eight cached rows
  const int token_, quarter_;
  int head_ = 0;
  Products* const products_;  // this lane's
  float* const weights_;
  float* const decay_;
  Fresh fresh_;
  float query_scale_ = 1, key_scale_ = 1;
  PagedTokenGates gates_;
  // What this lane's token mixes in of the new tokens' values.
  float own_query_[kPagedTokens], own_key_[kPagedTokens];
  int64_t out_;
  Act* kept_;
};

template <replayssm_family kFamily, class Act, class State, int kState>
__global__ void __launch_bounds__(32, paged_token_warps<kFamily, State, kState>())
    paged_tokens_kernel(const __grid_constant__ PagedStep p,
                        const __grid_constant__ PagedLaunch launch) {
  using Tokens = PagedTokens<kFamily, Act, State, kState>;
  extern __shared__ __align__(256) char memory[];
  release_successor();
  wait_for_predecessor();
  const PagedPlace place(p, launch, blockIdx.x);
  PagedRowLoad load(p);
  const int slot = load.slot();
  float* const shared = reinterpret_cast<float*>(memory);
  typename Tokens::Stream stream(p, place, launch.heads, max(slot, 0),
                                 shared + launch.layout.stream);
  load.load_by_slot(slot);
  if (slot >= 0) stream.start_states();
  const typename Tokens::Fresh fresh(p, place.key_head, load.token(),
                                     min(load.window(), launch.layout.window));
  const PagedItem b(place, launch, load.read(slot));
  if (b.row.slot < 0 || (b.row.window <= 0 && !b.row.flushes)) {
    copy_async_wait_all();
    return pad_outputs(p, b, launch.heads);
  }
  Tokens(p, launch, b, fresh, stream, shared).run();
}

}  // namespace replayssm::cuda
