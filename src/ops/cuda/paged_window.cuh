// A window of new tokens per sequence over paged caches: what verifies a draft.
//
// Grid: (heads and slices as PagedLaunch says, sequences). Every lane loads its share of the state
// first. Meanwhile the block lays the window's queries (Gated Delta: and its normalised keys, as
// the cache rounds them) out in shared memory and forms the decays of its heads; after a barrier
// the products of all keys with them; after another one, token by token,
//
//   r_s = P_s (a S q_s + sum_j w_j (k_j . q_s) v_j)                       j over the cached rows
//   o_s = r_s + sum_{i <= s} w_i D_is (k_i . q_s) v_i                     i over the window
//
// where v_i is the token's own value, for Gated Delta d_i = beta_i (v_i - the same sum with k_i for
// q, over rows before i). A row that flushes folds its cached rows into S first and stores it.
#pragma once

#include "ops/cuda/paged_lane.cuh"

namespace replayssm::cuda {

template <replayssm_family kFamily, class Act, class State, int kState>
class PagedWindow {
 public:
  using Lane = PagedLane<Act, State, kState, false>;
  using Map = typename Lane::Map;
  using ActMap = RowMap<Act, kState>;
  static constexpr bool kDelta = kFamily != REPLAYSSM_MAMBA2;
  static constexpr int kPerLane = kState / kRowLanes, kRows = Lane::kRows;
  static constexpr int kWidth = padded_width(kState);
  static constexpr int kAhead = 2;  // cached rows whose values a lane holds

  __device__ PagedWindow(const PagedStep& p, const PagedLaunch& launch, const PagedBlock& b,
                         float* shared)
      : p_(p),
        launch_(launch),
        layout_(launch.layout),
        b_(b),
        lane_(p, launch, b),
        shared_(shared) {}

  __device__ void run() {
    uint4 words[kRows * Lane::kRowWords];
    lane_.load(p_, words);
    PagedGateInputs inputs;
    if (threadIdx.x / 32 < launch_.heads)
      inputs.load(p_, b_, b_.head + int(threadIdx.x / 32), threadIdx.x % 32);
    stage_vectors();
    form_gates(inputs);
    __syncthreads();
    form_products();
    __syncthreads();
    float s[kRows][kPerLane];
    Lane::unpack(words, s);
    float decay = decays()[lane_.local_head];
    if (b_.row.flushes) {
      if (b_.row.history > 0) {
        lane_.fold(p_, b_, weights(), decay, s);
        lane_.store(p_, s);
      }
      decay = 1.0f;
    }
#pragma unroll 1
    for (int first = 0; first < b_.row.window; first += kPagedChunk) read_chunk(first, decay, s);
  }

 private:
  __device__ float* queries() const { return shared_ + layout_.queries; }
  __device__ float* keys() const { return shared_ + layout_.keys; }
  __device__ float* decays() const { return shared_ + layout_.decay; }
  __device__ float* weights() const {
    return shared_ + layout_.weights + lane_.local_head * (int(p_.ring) + 1);
  }
  // [cached rows and window, padded_window]
  __device__ float* key_query(int j) const {
    return shared_ + layout_.key_query + j * layout_.padded_window;
  }
  __device__ float* key_key(int j) const {
    return shared_ + layout_.key_key + j * layout_.padded_window;
  }
  __device__ float* prefix(int h) const {
    return shared_ + layout_.prefix + h * layout_.padded_window;
  }
  __device__ float* beta(int h) const { return shared_ + layout_.beta + h * layout_.padded_window; }
  // Decay and weight of the window's row i in token s.
  __device__ float* within(int h, int s) const {
    return shared_ + layout_.within + (h * layout_.window + s) * layout_.padded_window;
  }
  __device__ int head() const { return b_.head + lane_.local_head; }
  __device__ int place(int i) const { return b_.row.place(b_.row.history + i, p_.ring, true); }
  __device__ const Act* fresh(const PagedValues& x, int i) const {
    return at<Act>(x, b_.row.token + i, b_.key_head);
  }

  // Eight lanes for a vector of the window.
  __device__ void stage_vectors() const {
    const int groups = blockDim.x / kRowLanes, group = threadIdx.x / kRowLanes;
    const int kinds = kDelta ? 2 : 1, count = b_.row.window * kinds;
    const int turns = (count + groups - 1) / groups;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int n = turn * groups + group, i = min(n, count - 1) / kinds;
      const bool is_key = kDelta && n % 2 == 1;
      float x[kPerLane], scale = 1.0f;
      load_as<ActMap>(is_key ? fresh(p_.k, i) : fresh(p_.q, i), lane_.lane, x);
      if constexpr (kDelta) {
        if (p_.normalise) scale = rsqrtf(row_sum(dot(x, x)) + 1e-6f);
        if (!is_key) scale *= p_.scale;
      }
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) x[e] *= scale;
      if (n >= count) continue;
      if (is_key) {
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) x[e] = to_float(from_float<Act>(x[e]));
        if (b_.owns_keys) cache_key(i, x);
      }
      store_padded<ActMap>((is_key ? keys() : queries()) + i * kWidth, lane_.lane, x);
    }
    if (!kDelta && b_.owns_keys) {
      for (int i = group; i < b_.row.window; i += groups) {
        float x[kPerLane];
        load_as<ActMap>(fresh(p_.k, i), lane_.lane, x);
        cache_key(i, x);
      }
    }
  }
  __device__ void cache_key(int i, const float (&x)[kPerLane]) const {
    Act* to = at<Act>(p_.cache_k, b_.row.slot, b_.key_head, place(i));
#pragma unroll
    for (int c = 0; c < ActMap::kChunks; ++c)
      store_elements<Act, ActMap::kElems>(to + ActMap::element(c, lane_.lane),
                                          x + c * ActMap::kElems);
  }

  // A warp for a head, a lane for a token; `inputs` are those of its first head.
  __device__ void form_gates(PagedGateInputs inputs) const {
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int h = threadIdx.x / 32; h < launch_.heads; h += warps) {
      const int head = b_.head + h;
      if (h >= warps) inputs.load(p_, b_, head, lane);
      const PagedHeadGates gates(p_, inputs);
      form_weights(p_, b_, gates, inputs.cached, head, 0.0f,
                   shared_ + layout_.weights + h * (int(p_.ring) + 1), decays() + h);
      PagedGate own{0, 0, 0};
      const bool live = lane < b_.row.window;
      if (live) {
        own = gates.fresh(inputs.dt.read(p_.dt), true);
        if constexpr (kDelta) beta(h)[lane] = inputs.strength(p_);
        if (b_.owns_gates) *at<float>(p_.cache_g, b_.row.slot, head, place(lane)) = own.cached;
      }
      float since = 0, all = 0;  // log decays behind this lane's token; with it, from the first on
#pragma unroll 1
      for (int s = 0; s < b_.row.window; ++s) {
        const float next = __shfl_sync(kAllLanes, own.log_decay, s);
        if (s > lane) since += next;
        if (s <= lane) all += next;
        if (live && s >= lane) within(h, s)[lane] = own.weight * expf(fminf(since, 0.0f));
      }
      if (live) prefix(h)[lane] = expf(fminf(all, 0.0f));
    }
  }

  // Eight lanes for a key; of eight products each lane keeps one.
  __device__ void form_products() const {
    const int groups = blockDim.x / kRowLanes, group = threadIdx.x / kRowLanes;
    const int first = b_.row.flushes ? b_.row.history : 0;
    const int count = b_.row.history + b_.row.window - first;
    const int turns = (count + groups - 1) / groups;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int j = first + min(turn * groups + group, count - 1), i = j - b_.row.history;
      const bool live = turn * groups + group < count;
      float k[kPerLane];
      if (kDelta && i >= 0) {
        load_padded<ActMap>(keys() + i * kWidth, lane_.lane, k);
      } else if (i >= 0) {
        load_as<ActMap>(fresh(p_.k, i), lane_.lane, k);
      } else {
        load_as<ActMap>(
            at<Act>(p_.cache_k, b_.row.slot, b_.key_head, b_.row.place(j, p_.ring, true)),
            lane_.lane, k);
      }
      multiply(k, queries(), live, key_query(j));
      if constexpr (kDelta) multiply(k, keys(), live, key_key(j));
    }
  }
  __device__ void multiply(const float (&k)[kPerLane], const float* vectors, bool live,
                           float* products) const {
#pragma unroll 1
    for (int first = 0; first < b_.row.window; first += kRowLanes) {
      float part[kRowLanes];
#pragma unroll
      for (int n = 0; n < kRowLanes; ++n) {
        part[n] = 0;
        if (first + n >= b_.row.window) continue;
        float x[kPerLane];
        load_padded<ActMap>(vectors + (first + n) * kWidth, lane_.lane, x);
        part[n] = dot(k, x);
      }
      const float sum = sum_rows(part, lane_.lane);
      if (live) products[first + lane_.lane] = sum;
    }
  }

  // The cached values that this lane adds, times their weights.
  struct Cached {
    float values[kAhead][kRows];
  };
  __device__ void load_cached(int j, float (&v)[kRows]) const {
    load_elements<Act, kRows>(
        lane_.cached_values(p_, b_) + b_.row.place(j, p_.ring, true) * p_.cache_v.stride[2], v);
    const float weight = weights()[j];
#pragma unroll
    for (int r = 0; r < kRows; ++r) v[r] *= weight;
  }

  // What state and cached rows give for one vector of the window.
  __device__ float read_vector(const float (&s)[kRows][kPerLane], float decay, int history,
                               const Cached& cached, const float* vector, const float* products,
                               int token) const {
    float x[kPerLane], part[kRows];
    load_padded<Map>(vector + token * kWidth, lane_.lane, x);
#pragma unroll
    for (int r = 0; r < kRows; ++r) part[r] = decay * dot(s[r], x);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int j = lane_.lane + n * kRowLanes;
      if (j >= history) break;
      const float product = products[j * layout_.padded_window + token];
#pragma unroll
      for (int r = 0; r < kRows; ++r) part[r] = fmaf(product, cached.values[n][r], part[r]);
    }
#pragma unroll 1
    for (int j = lane_.lane + kAhead * kRowLanes; j < history; j += kRowLanes) {
      float v[kRows];
      load_cached(j, v);
      const float product = products[j * layout_.padded_window + token];
#pragma unroll
      for (int r = 0; r < kRows; ++r) part[r] = fmaf(product, v[r], part[r]);
    }
    return prefix(lane_.local_head)[token] * sum_rows(part, lane_.lane);
  }

  __device__ void read_chunk(int first, float decay, const float (&s)[kRows][kPerLane]) const {
    const int history = b_.row.flushes ? 0 : b_.row.history;
    const int count = min(b_.row.window - first, kPagedChunk);
    Cached cached;
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
      if (lane_.lane + n * kRowLanes < history)
        load_cached(lane_.lane + n * kRowLanes, cached.values[n]);
    float o[kPagedChunk], known[kPagedChunk];
#pragma unroll
    for (int n = 0; n < kPagedChunk; ++n) {
      if (n >= count) break;
      o[n] = read_vector(s, decay, history, cached, queries(), key_query(0), first + n);
      if constexpr (kDelta)
        known[n] = read_vector(s, decay, history, cached, keys(), key_key(0), first + n);
    }
    const int row = lane_.row + owned_row<kRows>(lane_.lane);
    Fresh fresh[kPagedChunk];
#pragma unroll
    for (int n = 0; n < kPagedChunk; ++n)
      if (n < count) fresh[n].load(*this, first + n, row);
#pragma unroll 1
    for (int i = 0; i < first; ++i) add_token<0>(i, first, count, earlier_value(i, row), o, known);
    finish_from<0>(first, count, row, fresh, o, known);
  }

  // What a lane needs of a new token to finish its row.
  struct Fresh {
    Act value;
    PagedFinish finish;
    __device__ void load(const PagedWindow& w, int i, int row) {
      const int64_t token = w.b_.row.token + i;
      value = at<Act>(w.p_.v, token, w.head())[row];
      if constexpr (!kDelta) finish.load(w.p_, token, w.head(), row);
    }
  };

  __device__ float fresh_value(int i, int row) const {
    return to_float(at<Act>(p_.v, b_.row.token + i, head())[row]);
  }
  // Of an earlier chunk's token.
  __device__ float earlier_value(int i, int row) const {
    if constexpr (kDelta) return corrected(i);
    return fresh_value(i, row);
  }
  __device__ float& corrected(int i) const {
    return shared_[layout_.corrected + i * launch_.rows + lane_.first +
                   owned_row<kRows>(lane_.lane)];
  }

  // Adds the window's row i to the chunk's tokens from kFrom on.
  template <int kFrom>
  __device__ void add_token(int i, int first, int count, float v, float (&o)[kPagedChunk],
                            float (&known)[kPagedChunk]) const {
    const int h = lane_.local_head, j = b_.row.history + i;
    const float *with_q = key_query(j) + first, *with_k = key_key(j) + first;
#pragma unroll
    for (int n = kFrom; n < kPagedChunk; ++n) {
      if (n >= count) break;
      const float write = within(h, first + n)[i] * v;
      o[n] = fmaf(with_q[n], write, o[n]);
      // A token does not correct itself.
      if (kDelta && first + n > i) known[n] = fmaf(with_k[n], write, known[n]);
    }
  }

  template <int kToken>
  __device__ void finish_from(int first, int count, int row, const Fresh (&fresh)[kPagedChunk],
                              float (&o)[kPagedChunk], float (&known)[kPagedChunk]) const {
    if constexpr (kToken < kPagedChunk) {
      if (kToken >= count) return;
      const int i = first + kToken;
      float v = to_float(fresh[kToken].value);
      if constexpr (kDelta) v = beta(lane_.local_head)[i] * (v - known[kToken]);
      add_token<kToken>(i, first, count, v, o, known);
      if constexpr (!kDelta) o[kToken] = fresh[kToken].finish.apply(p_, o[kToken], v);
      if (lane_.live && lane_.lane % (kRowLanes / kRows) == 0) keep(i, row, v, o[kToken]);
      if (kDelta && lane_.live && b_.row.window > kPagedChunk) corrected(i) = v;
      finish_from<kToken + 1>(first, count, row, fresh, o, known);
    }
  }
  // Caches the token's value and writes its output.
  __device__ void keep(int i, int row, float v, float o) const {
    at<Act>(p_.cache_v, b_.row.slot, head(), place(i))[row] = from_float<Act>(v);
    const int64_t token = b_.row.token + i;
    set_value(p_.out, index(p_.out, token, head()) + row, o);
  }

  const PagedStep& p_;
  const PagedLaunch& launch_;
  const PagedLayout& layout_;
  const PagedBlock& b_;
  const Lane lane_;
  float* const shared_;
};

template <replayssm_family kFamily, class Act, class State, int kState>
__global__ void __launch_bounds__(32 * kPagedMaxWarps, 2)
    paged_window_kernel(const __grid_constant__ PagedStep p,
                        const __grid_constant__ PagedLaunch launch) {
  extern __shared__ __align__(16) float shared_floats[];
  wait_for_predecessor();
  const PagedBlock b = paged_block(p, launch);
  if (b.row.slot < 0) return pad_outputs(p, launch, b);
  if (b.row.window <= 0 && !b.row.flushes) return;
  PagedWindow<kFamily, Act, State, kState>(p, launch, b, shared_floats).run();
}

}  // namespace replayssm::cuda
