// One new token per sequence over paged caches.
//
// Grid: (heads and slices as PagedLaunch says, sequences). Every lane loads its share of the state
// first, 256 bytes at once. While they come, eight lanes at a time form k_j . q (Gated Delta: also
// k_j . k) for a cached key, a warp forms the decays of a head. After the only barrier
//
//   o = a S q + sum_j w_j (k_j . q) v_j                                   Mamba-2, j up to the new
//   row d = beta (v - a S k - sum_j w_j (k_j . k) d_j), o = a S q + sum_j w_j (k_j . q) d_j + (k .
//   q) d                       Gated Delta
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
  static constexpr int kAhead = 2;  // rows of values that a lane loads before the barrier

  __device__ PagedSingle(const PagedStep& p, const PagedLaunch& launch, const PagedBlock& b,
                         float* shared)
      : p_(p),
        launch_(launch),
        b_(b),
        lane_(p, launch, b),
        key_query_(shared + launch.layout.key_query),
        key_key_(shared + launch.layout.key_key),
        weights_(shared + launch.layout.weights),
        decays_(shared + launch.layout.decay),
        betas_(shared + launch.layout.beta) {}

  __device__ void run() {
    uint4 words[Lane::kRows * Lane::kRowWords];
    lane_.load(p_, words);
    typename Lane::Values values[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load_values(lane_.lane + n * kRowLanes, values[n]);
    own_value_ = at<Act>(p_.v, b_.row.token, head())[owned()];
    if constexpr (!kDelta) finish_.load(p_, b_.row.token, head(), owned());
    PagedGateInputs inputs;
    if (threadIdx.x / 32 < launch_.heads) inputs.load(p_, b_, b_.head + int(threadIdx.x / 32), 0);
    form_products();
    form_gates(inputs);
    __syncthreads();
    float s[kRows][kPerLane];
    Lane::unpack(words, s);
    if (b_.row.flushes) {
      flush(s);
    } else {
      read(s, values);
    }
  }

 private:
  __device__ const Act* query() const { return at<Act>(p_.q, b_.row.token, b_.key_head); }
  __device__ const Act* key() const { return at<Act>(p_.k, b_.row.token, b_.key_head); }
  __device__ Act* cached_key(int j) const {
    return at<Act>(p_.cache_k, b_.row.slot, b_.key_head, j);
  }
  __device__ float* weights() const { return weights_ + lane_.local_head * (int(p_.ring) + 1); }
  __device__ int head() const { return b_.head + lane_.local_head; }

  // Rows of the sums: the new one counts for Mamba-2.
  __device__ int rows() const { return b_.row.history + (kDelta ? 0 : 1); }

  // The key of row j of the sums; any key where there is no such row.
  __device__ const Act* product_key(int j) const {
    return j < b_.row.history ? cached_key(j) : key();
  }

  // Products of the keys with the query (and the new key), eight lanes for a key.
  __device__ void form_products() {
    const int groups = blockDim.x / kRowLanes, group = threadIdx.x / kRowLanes;
    const bool keeps = b_.owns_keys && !b_.row.flushes && group == 0;
    float q[kPerLane], k[kPerLane];
    load_as<ActMap>(query(), lane_.lane, q);
    if constexpr (kDelta) {
      load_as<ActMap>(key(), lane_.lane, k);
    } else if (keeps) {
      float own[kPerLane];
      load_as<ActMap>(key(), lane_.lane, own);
      store_key(own);
    }
    float kq = 0, qq = 0, kk = 0;
    // Warps stay whole: sums go over all lanes.
    const int turns = (rows() + groups - 1) / groups;
    RawRow<Act, kState> next;
    next.load(product_key(group), lane_.lane);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int j = turn * groups + group;
      const bool live = j < rows();
      float other[kPerLane];
      next.read(other);
      if (turn + 1 < turns) next.load(product_key(j + groups), lane_.lane);
      float with_q = row_sum(dot(other, q)), with_k = 0;
      if constexpr (kDelta) with_k = row_sum(dot(other, k));
      if (live && lane_.lane == 0) {
        key_query_[j] = with_q;
        if constexpr (kDelta) key_key_[j] = with_k;
      }
    }
    if constexpr (kDelta) {
      kq = row_sum(dot(k, q));
      if (p_.normalise) {
        qq = row_sum(dot(q, q));
        kk = row_sum(dot(k, k));
        query_scale_ = p_.scale * rsqrtf(qq + 1e-6f);
        key_scale_ = rsqrtf(kk + 1e-6f);
      } else {
        query_scale_ = p_.scale;
        key_scale_ = 1.0f;
      }
      own_product_ = kq * query_scale_ * key_scale_;
      if (keeps) {
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) k[e] *= key_scale_;
        store_key(k);
      }
    }
  }
  __device__ void store_key(const float (&k)[kPerLane]) const {
    Act* to = cached_key(b_.row.history);
#pragma unroll
    for (int c = 0; c < ActMap::kChunks; ++c)
      store_elements<Act, ActMap::kElems>(to + ActMap::element(c, lane_.lane),
                                          k + c * ActMap::kElems);
  }

  // A warp for a head; `inputs` are those of its first one.
  __device__ void form_gates(PagedGateInputs inputs) const {
    const int warps = blockDim.x / 32, stride = static_cast<int>(p_.ring) + 1;
#pragma unroll 1
    for (int h = threadIdx.x / 32; h < launch_.heads; h += warps) {
      const int head = b_.head + h, lane = threadIdx.x % 32;
      if (h >= warps) inputs.load(p_, b_, head, 0);
      const PagedHeadGates gates(p_, inputs);
      const PagedGate own = gates.fresh(inputs.dt.read(p_.dt), false);
      form_weights(p_, b_, gates, inputs.cached, head, own.log_decay, weights_ + h * stride,
                   decays_ + h);
      if (lane != 0) continue;
      weights_[h * stride + b_.row.history] = own.weight;
      if constexpr (kDelta) betas_[h] = inputs.strength(p_);
      if (b_.owns_gates && !b_.row.flushes)
        *at<float>(p_.cache_g, b_.row.slot, head, b_.row.history) = own.cached;
    }
  }

  // Row j's values.
  __device__ void load_values(int j, typename Lane::Values& values) const {
    if (j >= rows()) return;
    const Act* from = j < b_.row.history ? lane_.cached_values(p_, b_) + j * p_.cache_v.stride[2]
                                         : fresh_values();
    values.load(from);
  }
  __device__ const Act* fresh_values() const {
    return at<Act>(p_.v, b_.row.token, head()) + lane_.row;
  }

  __device__ void read(const float (&s)[kRows][kPerLane],
                       const typename Lane::Values (&ahead)[kAhead]) {
    float with_q[kRows], with_k[kRows];
    products(s, decays_[lane_.local_head], with_q, with_k);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int j = lane_.lane + n * kRowLanes;
      if (j < rows()) mix(j, ahead[n], with_q, with_k);
    }
#pragma unroll 1
    for (int j = lane_.lane + kAhead * kRowLanes; j < rows(); j += kRowLanes) {
      typename Lane::Values values;
      load_values(j, values);
      mix(j, values, with_q, with_k);
    }
    const float o = sum_rows(with_q, lane_.lane);
    if constexpr (kDelta) {
      finish_delta(o, sum_rows(with_k, lane_.lane));
    } else {
      finish_row(o);
    }
  }

  // This lane's share of decay S q and decay S k.
  __device__ void products(const float (&s)[kRows][kPerLane], float decay, float (&with_q)[kRows],
                           float (&with_k)[kRows]) const {
    float x[kPerLane];
    load_as<Map>(query(), lane_.lane, x);
    const float q_scale = kDelta ? decay * query_scale_ : decay;
#pragma unroll
    for (int r = 0; r < kRows; ++r) with_q[r] = q_scale * dot(s[r], x);
    if constexpr (kDelta) {
      load_as<Map>(key(), lane_.lane, x);
#pragma unroll
      for (int r = 0; r < kRows; ++r) with_k[r] = decay * key_scale_ * dot(s[r], x);
    }
  }

  __device__ void mix(int j, const typename Lane::Values& raw, float (&with_q)[kRows],
                      float (&with_k)[kRows]) const {
    float v[kRows];
    raw.read(v);
    const float weight = weights()[j];
    const float q = weight * key_query_[j] * (kDelta ? query_scale_ : 1.0f);
#pragma unroll
    for (int r = 0; r < kRows; ++r) with_q[r] = fmaf(q, v[r], with_q[r]);
    if constexpr (kDelta) {
      const float k = weight * key_key_[j] * key_scale_;
#pragma unroll
      for (int r = 0; r < kRows; ++r) with_k[r] = fmaf(k, v[r], with_k[r]);
    }
  }

  __device__ void flush(float (&s)[kRows][kPerLane]) {
    lane_.fold(p_, b_, weights(), decays_[lane_.local_head], s);
    float with_q[kRows], with_k[kRows], k[kPerLane], v[kRows];
    load_as<Map>(key(), lane_.lane, k);
    if constexpr (kDelta) {
      products(s, 1.0f, with_q, with_k);
      const float d = finish_delta(sum_rows(with_q, lane_.lane), sum_rows(with_k, lane_.lane));
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        v[r] = __shfl_sync(kAllLanes, d, r * (kRowLanes / kRows), kRowLanes);
      Lane::add_row(key_scale_, v, k, s);
    } else {
      load_elements<Act, kRows>(fresh_values(), v);
      Lane::add_row(weights()[b_.row.history], v, k, s);
      products(s, 1.0f, with_q, with_k);
      finish_row(sum_rows(with_q, lane_.lane));
    }
    lane_.store(p_, s);
  }

  // Whether this lane finishes a row, and which.
  __device__ bool owns() const { return lane_.live && lane_.lane % (kRowLanes / kRows) == 0; }
  __device__ int owned() const { return lane_.row + owned_row<kRows>(lane_.lane); }

  __device__ void finish_row(float o) const {
    if (!owns()) return;
    const int at_row = owned();
    set_value(p_.out, index(p_.out, b_.row.token, head()) + at_row,
              finish_.apply(p_, o, to_float(own_value_)));
    if (!b_.row.flushes)
      at<Act>(p_.cache_v, b_.row.slot, head(), b_.row.history)[at_row] = own_value_;
  }

  // Writes o, keeps d and returns it.
  __device__ float finish_delta(float o, float known) const {
    const int at_row = owned();
    const float d = betas_[lane_.local_head] * (to_float(own_value_) - known);
    if (owns()) {
      set_value(p_.out, index(p_.out, b_.row.token, head()) + at_row, fmaf(d, own_product_, o));
      if (!b_.row.flushes)
        at<Act>(p_.cache_v, b_.row.slot, head(), b_.row.history)[at_row] = from_float<Act>(d);
    }
    return d;
  }

  const PagedStep& p_;
  const PagedLaunch& launch_;
  const PagedBlock& b_;
  const Lane lane_;
  float* const key_query_;
  float* const key_key_;
  float* const weights_;
  float* const decays_;
  float* const betas_;
  float query_scale_ = 1, key_scale_ = 1, own_product_ = 0;
  Act own_value_;  // the new token's, in the row that this lane finishes
  PagedFinish finish_;
};

template <replayssm_family kFamily, class Act, class State, int kState>
__global__ void __launch_bounds__(32 * kPagedMaxWarps, 2)
    paged_single_kernel(const __grid_constant__ PagedStep p,
                        const __grid_constant__ PagedLaunch launch) {
  extern __shared__ __align__(16) float shared_floats[];
  wait_for_predecessor();
  const PagedBlock b = paged_block(p, launch);
  if (b.row.slot < 0) return pad_outputs(p, launch, b);
  PagedSingle<kFamily, Act, State, kState>(p, launch, b, shared_floats).run();
}

}  // namespace replayssm::cuda
