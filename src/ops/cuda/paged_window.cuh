// A window of more than eight new tokens per sequence over paged caches.
//
// Grid: (items, sequences), a block being a warp that takes a piece of a head's rows. Its lanes
// start the first passes over the state. Meanwhile the warp lays the window's queries (Gated Delta:
// and its normalised keys, as the cache rounds them) out in shared memory, forms the decays and the
// products of all keys with them. Then pass by pass and token by token
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

  __device__ PagedWindow(const PagedStep& p, const PagedLaunch& launch, const PagedItem& b,
                         float* shared)
      : p_(p),
        layout_(launch.layout),
        b_(b),
        lane_(p, b, b.row.slot, shared + launch.layout.stream),
        shared_(shared) {}

  __device__ void run() {
    lane_.start();
    PagedGateInputs inputs;
    inputs.load(p_, b_, b_.head, threadIdx.x % 32);
    stage_vectors();
    form_gates(inputs);
    __syncwarp();
    form_products();
    __syncwarp();
    Values next;
    load_cached(0, next);
    const int passes = lane_.passes();
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      const Values now = next;
      if (pass + 1 < passes) load_cached(pass + 1, next);
      float s[kRows][kPerLane];
      lane_.take(pass, s);
      float decay = *this->decay();
      if (b_.row.flushes) {
        if (b_.row.history > 0) {
          lane_.fold(p_, b_, weights(), decay, pass, s);
          lane_.store(pass, s);
        }
        decay = 1.0f;
      }
#pragma unroll 1
      for (int first = 0; first < b_.row.window; first += kPagedChunk)
        read_chunk(pass, first, decay, now, s);
    }
  }

 private:
  __device__ float* queries() const { return shared_ + layout_.queries; }
  __device__ float* keys() const { return shared_ + layout_.keys; }
  __device__ float* decay() const { return shared_ + layout_.decay; }
  __device__ float* weights() const { return shared_ + layout_.weights; }
  // [cached rows and window, padded_window]
  __device__ float* key_query(int j) const {
    return shared_ + layout_.key_query + j * layout_.padded_window;
  }
  __device__ float* key_key(int j) const {
    return shared_ + layout_.key_key + j * layout_.padded_window;
  }
  __device__ float* prefix() const { return shared_ + layout_.prefix; }
  __device__ float* beta() const { return shared_ + layout_.beta; }
  // Decay and weight of the window's row i in token s.
  __device__ float* within(int s) const {
    return shared_ + layout_.within + s * layout_.padded_window;
  }
  __device__ int place(int i) const { return b_.row.place(b_.row.history + i, p_.ring, true); }
  __device__ const Act* fresh(const PagedValues& x, int i) const {
    return at<Act>(x, b_.row.token + i, b_.key_head);
  }

  // Eight lanes for a vector of the window.
  __device__ void stage_vectors() const {
    const int groups = 32 / kRowLanes, group = threadIdx.x % 32 / kRowLanes;
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

  // A lane for a token.
  __device__ void form_gates(const PagedGateInputs& inputs) const {
    const int lane = threadIdx.x % 32;
    const PagedHeadGates gates(p_, inputs);
    form_weights(p_, b_, gates, inputs.cached, b_.head, 0.0f, weights(), decay());
    PagedGate own{0, 0, 0};
    const bool live = lane < b_.row.window;
    if (live) {
      own = gates.fresh(inputs.dt.read(p_.dt), true);
      if constexpr (kDelta) beta()[lane] = inputs.strength(p_);
      if (b_.owns_gates) *at<float>(p_.cache_g, b_.row.slot, b_.head, place(lane)) = own.cached;
    }
    float since = 0, all = 0;  // log decays behind this lane's token; with it, from the first on
#pragma unroll 1
    for (int s = 0; s < b_.row.window; ++s) {
      const float next = __shfl_sync(kAllLanes, own.log_decay, s);
      if (s > lane) since += next;
      if (s <= lane) all += next;
      if (live && s >= lane) within(s)[lane] = own.weight * expf(fminf(since, 0.0f));
    }
    if (live) prefix()[lane] = expf(fminf(all, 0.0f));
  }

  // Eight lanes for a key; of eight products each lane keeps one.
  __device__ void form_products() const {
    const int groups = 32 / kRowLanes, group = threadIdx.x % 32 / kRowLanes;
    const int rows = mixed();
    RawRow<Act, kState> next;
    if (rows > 0) next.load(cached_key(min(group, rows - 1)), lane_.lane);
#pragma unroll 1
    for (int first = 0; first < rows; first += groups) {
      float k[kPerLane];
      next.read(k);
      next.load(cached_key(min(first + groups + group, rows - 1)), lane_.lane);
      multiply(k, first + group, first + group < rows);
    }
#pragma unroll 1
    for (int first = 0; first < b_.row.window; first += groups) {
      const int i = min(first + group, b_.row.window - 1);
      float k[kPerLane];
      if constexpr (kDelta) {
        load_padded<ActMap>(keys() + i * kWidth, lane_.lane, k);
      } else {
        load_as<ActMap>(fresh(p_.k, i), lane_.lane, k);
      }
      multiply(k, b_.row.history + i, first + group < b_.row.window);
    }
  }
  __device__ const Act* cached_key(int j) const {
    return at<Act>(p_.cache_k, b_.row.slot, b_.key_head, b_.row.place(j, p_.ring, true));
  }
  // Row j's products; they are kept where it is live.
  __device__ void multiply(const float (&k)[kPerLane], int j, bool live) const {
    multiply(k, queries(), live, key_query(live ? j : 0));
    if constexpr (kDelta) multiply(k, keys(), live, key_key(live ? j : 0));
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

  // Rows that the readout mixes in; a flush has folded them.
  __device__ int mixed() const { return b_.row.flushes ? 0 : b_.row.history; }

  // The values of the cached rows that this lane adds, of a pass.
  struct Values {
    typename Lane::Values rows[kAhead];
  };
  __device__ const Act* cached(int pass, int j) const {
    return lane_.cached_values(p_, b_, pass) +
           b_.row.place(j, p_.ring, true) * p_.cache_v.stride[2];
  }
  __device__ void load_cached(int pass, Values& values) const {
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
      if (lane_.lane + n * kRowLanes < mixed())
        values.rows[n].load(cached(pass, lane_.lane + n * kRowLanes));
  }
  // Times its weight.
  __device__ void weigh(int j, const typename Lane::Values& raw, float (&v)[kRows]) const {
    raw.read(v);
    const float weight = weights()[j];
#pragma unroll
    for (int r = 0; r < kRows; ++r) v[r] *= weight;
  }

  // What state and cached rows give for one vector of the window.
  __device__ float read_vector(int pass, const float (&s)[kRows][kPerLane], float decay,
                               const float (&cached_rows)[kAhead][kRows], const float* vector,
                               const float* products, int token) const {
    float x[kPerLane], part[kRows];
    load_padded<Map>(vector + token * kWidth, lane_.lane, x);
#pragma unroll
    for (int r = 0; r < kRows; ++r) part[r] = decay * dot(s[r], x);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int j = lane_.lane + n * kRowLanes;
      if (j >= mixed()) break;
      const float product = products[j * layout_.padded_window + token];
#pragma unroll
      for (int r = 0; r < kRows; ++r) part[r] = fmaf(product, cached_rows[n][r], part[r]);
    }
#pragma unroll 1
    for (int j = lane_.lane + kAhead * kRowLanes; j < mixed(); j += kRowLanes) {
      typename Lane::Values raw;
      raw.load(cached(pass, j));
      float v[kRows];
      weigh(j, raw, v);
      const float product = products[j * layout_.padded_window + token];
#pragma unroll
      for (int r = 0; r < kRows; ++r) part[r] = fmaf(product, v[r], part[r]);
    }
    return prefix()[token] * sum_rows(part, lane_.lane);
  }

  __device__ void read_chunk(int pass, int first, float decay, const Values& values,
                             const float (&s)[kRows][kPerLane]) const {
    const int count = min(b_.row.window - first, kPagedChunk);
    const int row = lane_.owned(b_, pass);
    Fresh fresh[kPagedChunk];
#pragma unroll
    for (int n = 0; n < kPagedChunk; ++n)
      if (n < count) fresh[n].load(*this, first + n, row);
    float cached_rows[kAhead][kRows];
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
      if (lane_.lane + n * kRowLanes < mixed())
        weigh(lane_.lane + n * kRowLanes, values.rows[n], cached_rows[n]);
    float o[kPagedChunk], known[kPagedChunk];
#pragma unroll
    for (int n = 0; n < kPagedChunk; ++n) {
      if (n >= count) break;
      o[n] = read_vector(pass, s, decay, cached_rows, queries(), key_query(0), first + n);
      if constexpr (kDelta)
        known[n] = read_vector(pass, s, decay, cached_rows, keys(), key_key(0), first + n);
    }
#pragma unroll 1
    for (int i = 0; i < first; ++i) add_token<0>(i, first, count, earlier_value(i, row), o, known);
    finish_from<0>(pass, first, count, row, fresh, o, known);
  }

  // What a lane needs of a new token to finish its row.
  struct Fresh {
    Act value;
    PagedFinish finish;
    __device__ void load(const PagedWindow& w, int i, int row) {
      const int64_t token = w.b_.row.token + i;
      value = at<Act>(w.p_.v, token, w.b_.head)[row];
      if constexpr (!kDelta) finish.load(w.p_, token, w.b_.head, row);
    }
  };

  // Of an earlier chunk's token.
  __device__ float earlier_value(int i, int row) const {
    if constexpr (kDelta) return corrected(i);
    return to_float(at<Act>(p_.v, b_.row.token + i, b_.head)[row]);
  }
  // d of the window's row i, in the row of the pass that this lane finishes.
  __device__ float& corrected(int i) const {
    return shared_[layout_.corrected + i * 32 + threadIdx.x % 32];
  }

  // Adds the window's row i to the chunk's tokens from kFrom on.
  template <int kFrom>
  __device__ void add_token(int i, int first, int count, float v, float (&o)[kPagedChunk],
                            float (&known)[kPagedChunk]) const {
    const int j = b_.row.history + i;
    const float *with_q = key_query(j) + first, *with_k = key_key(j) + first;
#pragma unroll
    for (int n = kFrom; n < kPagedChunk; ++n) {
      if (n >= count) break;
      const float write = within(first + n)[i] * v;
      o[n] = fmaf(with_q[n], write, o[n]);
      // A token does not correct itself.
      if (kDelta && first + n > i) known[n] = fmaf(with_k[n], write, known[n]);
    }
  }

  template <int kToken>
  __device__ void finish_from(int pass, int first, int count, int row,
                              const Fresh (&fresh)[kPagedChunk], float (&o)[kPagedChunk],
                              float (&known)[kPagedChunk]) const {
    if constexpr (kToken < kPagedChunk) {
      if (kToken >= count) return;
      const int i = first + kToken;
      float v = to_float(fresh[kToken].value);
      if constexpr (kDelta) v = beta()[i] * (v - known[kToken]);
      add_token<kToken>(i, first, count, v, o, known);
      if constexpr (!kDelta) o[kToken] = fresh[kToken].finish.apply(p_, o[kToken], v);
      if (lane_.owns(pass)) keep(i, row, v, o[kToken]);
      if (kDelta && b_.row.window > kPagedChunk) corrected(i) = v;
      finish_from<kToken + 1>(pass, first, count, row, fresh, o, known);
    }
  }
  // Caches the token's value and writes its output.
  __device__ void keep(int i, int row, float v, float o) const {
    at<Act>(p_.cache_v, b_.row.slot, b_.head, place(i))[row] = from_float<Act>(v);
    const int64_t token = b_.row.token + i;
    set_value(p_.out, index(p_.out, token, b_.head) + row, o);
  }

  const PagedStep& p_;
  const PagedLayout& layout_;
  const PagedItem& b_;
  Lane lane_;
  float* const shared_;
};

template <replayssm_family kFamily, class Act, class State, int kState>
__global__ void __launch_bounds__(32, 12)
    paged_window_kernel(const __grid_constant__ PagedStep p,
                        const __grid_constant__ PagedLaunch launch) {
  extern __shared__ __align__(256) char memory[];
  release_successor();
  wait_for_predecessor();
  const PagedItem b({p, launch, static_cast<int>(blockIdx.x)}, launch, paged_row(p, blockIdx.y));
  if (b.row.slot < 0) return pad_outputs(p, b);
  if (b.row.window <= 0 && !b.row.flushes) return;
  PagedWindow<kFamily, Act, State, kState>(p, launch, b, reinterpret_cast<float*>(memory)).run();
}

}  // namespace replayssm::cuda
