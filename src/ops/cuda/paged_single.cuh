// One new token per sequence over paged caches.
//
// Grid: (items, sequences), a block being a warp that takes a piece of a head's rows. Its lanes
// start the first passes over the state, then, while those come, eight lanes at a time form k_j . q
// (Gated Delta: also k_j . k) for a cached key, and the warp the decays. Then pass by pass
//
//   o = a S q + sum_j w_j (k_j . q) v_j                         Mamba-2, j up to the new row
//   d = beta (v - a S k - sum_j w_j (k_j . k) d_j)              Gated Delta
//   o = a S q + sum_j w_j (k_j . q) d_j + (k . q) d
//
// A row that flushes runs the same sums over S in registers and stores it.
#pragma once

#include "ops/cuda/paged_lane.cuh"

namespace replayssm::cuda {

template <replayssm_family kFamily, class Act, class State, int kState>
class PagedSingle {
 public:
  using Lane = PagedLane<Act, State, kState, true>;
  using Map = typename Lane::Map;
  using ActMap = RowMap<Act, kState>;
  static constexpr bool kDelta = kFamily != REPLAYSSM_MAMBA2;
  static constexpr int kPerLane = kState / kRowLanes, kRows = Lane::kRows;
  static constexpr int kAhead = 2;  // rows of values that a lane holds
  static constexpr int kGroups = 32 / kRowLanes, kTurns = 4;

  // lane: has started.
  __device__ PagedSingle(const PagedStep& p, const PagedLaunch& launch, const PagedItem& b,
                         Lane& lane, float* shared)
      : p_(p),
        b_(b),
        lane_(lane),
        key_query_(shared + launch.layout.key_query),
        key_key_(shared + launch.layout.key_key),
        weights_(shared + launch.layout.weights),
        decay_(shared + launch.layout.decay),
        beta_(shared + launch.layout.beta) {}

  __device__ void run() {
    PagedGateInputs inputs;
    inputs.load(p_, b_, b_.head, 0);
    Pass next;
    load(0, next);
    form_products();
    form_gates(inputs);
    __syncwarp();
    float q[kPerLane], k[kPerLane];
    load_vectors(q, k);
    float with_q[kAhead], with_k[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) factors(lane_.lane + n * kRowLanes, with_q[n], with_k[n]);
    const int passes = lane_.passes();
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      const Pass now = next;
      if (pass + 1 < passes) load(pass + 1, next);
      float s[kRows][kPerLane];
      lane_.take(pass, s);
      if (b_.row.flushes) {
        flush(pass, now, q, k, s);
      } else {
        read(pass, now, q, k, with_q, with_k, s);
      }
    }
  }

 private:
  // What a lane needs for a pass besides the state.
  struct Pass {
    typename Lane::Values values[kAhead];
    Act own;  // the new token's, in the row that this lane finishes
    PagedFinish finish;
  };
  __device__ void load(int pass, Pass& x) const {
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
      if (lane_.lane + n * kRowLanes < rows())
        x.values[n].load(values_of(lane_.lane + n * kRowLanes, pass));
    const int row = lane_.owned(b_, pass);
    x.own = at<Act>(p_.v, b_.row.token, b_.head)[row];
    if constexpr (!kDelta) x.finish.load(p_, b_.row.token, b_.head, row);
  }

  __device__ const Act* query() const { return at<Act>(p_.q, b_.row.token, b_.key_head); }
  __device__ const Act* key() const { return at<Act>(p_.k, b_.row.token, b_.key_head); }
  __device__ Act* cached_key(int j) const {
    return at<Act>(p_.cache_k, b_.row.slot, b_.key_head, j);
  }
  // The key of row j of the sums; any key where there is no such row.
  __device__ const Act* product_key(int j) const {
    return j < b_.row.history ? cached_key(j) : key();
  }
  __device__ const Act* values_of(int j, int pass) const {
    return j < b_.row.history ? lane_.cached_values(p_, b_, pass) + j * p_.cache_v.stride[2]
                              : lane_.fresh_values(p_, b_, 0, pass);
  }

  // Rows of the sums: the new one counts for Mamba-2.
  __device__ int rows() const { return b_.row.history + (kDelta ? 0 : 1); }

  // Products of the keys with the query (and the new key), eight lanes for a key.
  __device__ void form_products() {
    const int group = threadIdx.x % 32 / kRowLanes;
    RawRow<Act, kState> raw_q, raw_k, keys[kTurns];
    raw_q.load(query(), lane_.lane);
    raw_k.load(key(), lane_.lane);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
      keys[turn].load(product_key(turn * kGroups + group), lane_.lane);
    float q[kPerLane], k[kPerLane];
    raw_q.read(q);
    raw_k.read(k);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
      if (turn * kGroups < rows()) form_product(turn * kGroups + group, keys[turn], q, k);
#pragma unroll 1
    for (int j = kTurns * kGroups; j < rows(); j += kGroups) {
      keys[0].load(product_key(j + group), lane_.lane);
      form_product(j + group, keys[0], q, k);
    }
    if constexpr (kDelta) {
      own_product_ = row_sum(dot(k, q));
      query_scale_ = p_.scale;
      if (p_.normalise) {
        query_scale_ *= rsqrtf(row_sum(dot(q, q)) + 1e-6f);
        key_scale_ = rsqrtf(row_sum(dot(k, k)) + 1e-6f);
      }
      own_product_ *= query_scale_ * key_scale_;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) k[e] *= key_scale_;
    }
    if (b_.owns_keys && !b_.row.flushes && group == 0) store_key(k);
  }
  // Of row j. Warps stay whole: sums go over all lanes.
  __device__ void form_product(int j, const RawRow<Act, kState>& raw, const float (&q)[kPerLane],
                               const float (&k)[kPerLane]) const {
    float x[kPerLane];
    raw.read(x);
    const float with_q = row_sum(dot(x, q));
    float with_k = 0;
    if constexpr (kDelta) with_k = row_sum(dot(x, k));
    if (j >= rows() || lane_.lane != 0) return;
    key_query_[j] = with_q;
    if constexpr (kDelta) key_key_[j] = with_k;
  }
  __device__ void store_key(const float (&k)[kPerLane]) const {
    Act* to = cached_key(b_.row.history);
#pragma unroll
    for (int c = 0; c < ActMap::kChunks; ++c)
      store_elements<Act, ActMap::kElems>(to + ActMap::element(c, lane_.lane),
                                          k + c * ActMap::kElems);
  }

  __device__ void form_gates(const PagedGateInputs& inputs) const {
    const PagedHeadGates gates(p_, inputs);
    const PagedGate own = gates.fresh(inputs.dt.read(p_.dt), false);
    form_weights(p_, b_, gates, inputs.cached, b_.head, own.log_decay, weights_, decay_);
    if (threadIdx.x % 32 != 0) return;
    weights_[b_.row.history] = own.weight;
    if constexpr (kDelta) *beta_ = inputs.strength(p_);
    if (b_.owns_gates && !b_.row.flushes)
      *at<float>(p_.cache_g, b_.row.slot, b_.head, b_.row.history) = own.cached;
  }

  // This lane's share of query and key, as the state's rows lie; a flush decays the state itself.
  __device__ void load_vectors(float (&q)[kPerLane], float (&k)[kPerLane]) const {
    const float decay = b_.row.flushes ? 1.0f : *decay_;
    load_as<Map>(query(), lane_.lane, q);
    load_as<Map>(key(), lane_.lane, k);
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) {
      q[e] *= decay * query_scale_;
      if constexpr (kDelta) k[e] *= key_scale_;
    }
  }
  // What row j's values are multiplied with.
  __device__ void factors(int j, float& with_q, float& with_k) const {
    with_q = with_k = 0;
    if (j >= rows() || b_.row.flushes) return;
    with_q = weights_[j] * key_query_[j] * query_scale_;
    if constexpr (kDelta) with_k = weights_[j] * key_key_[j] * key_scale_;
  }

  __device__ void read(int pass, const Pass& now, const float (&q)[kPerLane],
                       const float (&k)[kPerLane], const float (&with_q)[kAhead],
                       const float (&with_k)[kAhead], const float (&s)[kRows][kPerLane]) const {
    float out[kRows], known[kRows];
    const float decay = *decay_;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      out[r] = dot(s[r], q);
      if constexpr (kDelta) known[r] = decay * dot(s[r], k);
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
      if (lane_.lane + n * kRowLanes < rows()) mix(now.values[n], with_q[n], with_k[n], out, known);
#pragma unroll 1
    for (int j = lane_.lane + kAhead * kRowLanes; j < rows(); j += kRowLanes) {
      typename Lane::Values values;
      values.load(values_of(j, pass));
      float more_q, more_k;
      factors(j, more_q, more_k);
      mix(values, more_q, more_k, out, known);
    }
    const float o = sum_rows(out, lane_.lane);
    if constexpr (kDelta) {
      finish_delta(pass, now, o, sum_rows(known, lane_.lane));
    } else {
      finish_row(pass, now, o);
    }
  }
  __device__ static void mix(const typename Lane::Values& raw, float with_q, float with_k,
                             float (&out)[kRows], float (&known)[kRows]) {
    float v[kRows];
    raw.read(v);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      out[r] = fmaf(with_q, v[r], out[r]);
      if constexpr (kDelta) known[r] = fmaf(with_k, v[r], known[r]);
    }
  }

  __device__ void flush(int pass, const Pass& now, const float (&q)[kPerLane],
                        const float (&k)[kPerLane], float (&s)[kRows][kPerLane]) const {
    lane_.fold(p_, b_, weights_, *decay_, pass, s);
    float out[kRows], known[kRows], v[kRows];
    if constexpr (kDelta) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        out[r] = dot(s[r], q);
        known[r] = dot(s[r], k);
      }
      const float o = sum_rows(out, lane_.lane);
      const float d = finish_delta(pass, now, o, sum_rows(known, lane_.lane));
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        v[r] = __shfl_sync(kAllLanes, d, r * (kRowLanes / kRows), kRowLanes);
      Lane::add_row(1.0f, v, k, s);
    } else {
      load_elements<Act, kRows>(lane_.fresh_values(p_, b_, 0, pass), v);
      Lane::add_row(weights_[b_.row.history], v, k, s);
#pragma unroll
      for (int r = 0; r < kRows; ++r) out[r] = dot(s[r], q);
      finish_row(pass, now, sum_rows(out, lane_.lane));
    }
    lane_.store(pass, s);
  }

  __device__ void finish_row(int pass, const Pass& now, float o) const {
    if (!lane_.owns(pass)) return;
    const int row = lane_.owned(b_, pass);
    set_value(p_.out, index(p_.out, b_.row.token, b_.head) + row,
              now.finish.apply(p_, o, to_float(now.own)));
    if (!b_.row.flushes) at<Act>(p_.cache_v, b_.row.slot, b_.head, b_.row.history)[row] = now.own;
  }
  // Writes o, keeps d and returns it.
  __device__ float finish_delta(int pass, const Pass& now, float o, float known) const {
    const float d = *beta_ * (to_float(now.own) - known);
    if (lane_.owns(pass)) {
      const int row = lane_.owned(b_, pass);
      set_value(p_.out, index(p_.out, b_.row.token, b_.head) + row, fmaf(d, own_product_, o));
      if (!b_.row.flushes)
        at<Act>(p_.cache_v, b_.row.slot, b_.head, b_.row.history)[row] = from_float<Act>(d);
    }
    return d;
  }

  const PagedStep& p_;
  const PagedItem& b_;
  Lane& lane_;
  float* const key_query_;
  float* const key_key_;
  float* const weights_;
  float* const decay_;
  float* const beta_;
  float query_scale_ = 1, key_scale_ = 1, own_product_ = 0;
};

template <replayssm_family kFamily, class Act, class State, int kState>
__global__ void __launch_bounds__(32, 12)
    paged_single_kernel(const __grid_constant__ PagedStep p,
                        const __grid_constant__ PagedLaunch launch) {
  extern __shared__ __align__(256) char memory[];
  release_successor();
  wait_for_predecessor();
  const PagedPlace place(p, launch, blockIdx.x);
  PagedRowLoad load(p);
  const int slot = load.slot();
  float* const shared = reinterpret_cast<float*>(memory);
  using Single = PagedSingle<kFamily, Act, State, kState>;
  typename Single::Lane lane(p, place, max(slot, 0), shared + launch.layout.stream);
  if (slot >= 0) lane.start();
  load.load_by_slot(slot);
  const PagedItem b(place, launch, load.read(slot));
  if (b.row.slot < 0) {
    copy_async_wait_all();
    return pad_outputs(p, b);
  }
  Single(p, launch, b, lane, shared).run();
}

}  // namespace replayssm::cuda
