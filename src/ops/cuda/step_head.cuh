// What a warp forms of ring and window for one value head: the query walked back to the checkpoint,
// and what each row adds to the output.
#pragma once

#include "ops/cuda/step_block.cuh"

namespace replayssm::cuda {

template <Family kFamily, class Act, int kState>
class WarpHead {
 public:
  using Rows = BlockRows<kFamily, Act, kState>;
  using Map = typename Rows::Map;
  static constexpr int kPerLane = Rows::kPerLane;

  __device__ WarpHead(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                      const Rows& rows)
      : p_(p),
        b_(b),
        rows_(rows),
        lane_(threadIdx.x % 32),
        strength_(reinterpret_cast<float*>(rows.scratch(threadIdx.x / 32))),
        decay_(strength_ + launch.layout.rows),
        factor_(decay_ + launch.layout.rows),
        coefficient_(factor_ + launch.layout.rows),
        target_(strength_ + (4 * launch.layout.rows + 3) / 4 * 4),
        parts_(reinterpret_cast<uint16_t*>(target_ + padded_width(kState))) {}

  // Row j of the current head: write strength, decay, what makes its raw key the recurrence's
  // (Mamba-2, whose keys are: its log decay).
  __device__ float strength(int j) const { return strength_[j]; }
  __device__ float decay(int j) const { return decay_[j]; }
  __device__ float factor(int j) const { return factor_[j]; }
  // The vector that meets the state: padded fp32; three 16-bit parts, [3, kState].
  __device__ const float* target() const { return target_; }
  __device__ uint16_t* parts() const { return parts_; }

  using Gates = typename Rows::Gates;

  // The gates of a head's first 32 rows, one in each lane.
  __device__ Gates gates(int head) const {
    return lane_ < b_.rows ? rows_.gates(head, lane_) : Gates{};
  }

  // Makes `head` of the block current. Columns [begin, end) of the block's outputs get the share of
  // ring and window. The warp that has a head's first columns appends its gates.
  __device__ void prepare(int head, const Gates& first, int begin, int end, bool appends) {
    __syncwarp();
#pragma unroll 1
    for (int j = lane_; j < b_.rows; j += 32) {
      const Gates gates = j < 32 ? first : rows_.gates(head, j);
      strength_[j] = gates.b;
      if constexpr (kFamily == Family::kMamba2) factor_[j] = gates.g;
      if constexpr (kFamily != Family::kKimiDelta) decay_[j] = expf(gates.g);
      if (j >= b_.history && appends) rows_.append_gates(head, j, gates);
    }
    float t[kPerLane] = {};
    if (b_.window > 0) rows_.query(0, lane_ % kRowLanes, t);
    if constexpr (is_delta(kFamily)) {
      key_factors();
      const float scale = factor_of(t) * (1.0f / sqrtf(kState));
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) t[e] *= scale;
    }
    if (b_.window == 0) return __syncwarp();
    int mixed = b_.rows;  // rows from here on are mixed in
    if (p_.route == Route::kOutputOnly) {
      mixed = b_.stored;
      __syncwarp();
      if constexpr (kFamily == Family::kMamba2) {
        scan_back(t);
      } else {
        walk_back(head, t);
      }
    }
    if (lane_ < kRowLanes) store_padded<Map>(target_, lane_, t);
    __syncwarp();
    if (p_.skip) {
      const float skip = p_.skip[b_.head + head];
      if (lane_ == 0) {
        float& last = coefficient_[b_.rows - 1];
        last = mixed < b_.rows ? last + skip : skip;
      }
      mixed = min(mixed, b_.rows - 1);
      __syncwarp();
    }
    mix(mixed, begin, end);
  }

 private:
  // 1 / |k| of a row whose share this lane holds.
  __device__ static float factor_of(const float (&k)[kPerLane]) {
    return 1.0f / sqrtf(row_sum(dot<4>(k, k)) + kL2NormEps);
  }

  __device__ void key_factors() {
    const int group = lane_ / kRowLanes;
#pragma unroll 1
    for (int base = 0; base < b_.rows; base += 4) {
      float k[kPerLane];
      rows_.template key<Map>(min(base + group, b_.rows - 1), lane_ % kRowLanes, k);
      const float factor = factor_of(k);
      if (lane_ % kRowLanes == 0 && base + group < b_.rows) factor_[base + group] = factor;
    }
  }

  // Mamba-2: no row changes the query, so that its products with all keys are independent.
  __device__ void scan_back(float (&t)[kPerLane]) {
    const int group = lane_ / kRowLanes;
#pragma unroll 1
    for (int base = b_.stored; base < b_.rows; base += 4) {
      const int j = min(base + group, b_.rows - 1);
      float k[kPerLane];
      rows_.template key<Map>(j, lane_ % kRowLanes, k);
      const float product = row_sum(dot<4>(k, t));
      if (lane_ % kRowLanes == 0 && base + group < b_.rows) coefficient_[j] = product;
    }
    __syncwarp();
    float carried = 0;  // log decay of the rows so far, newest first
#pragma unroll 1
    for (int newest = b_.rows - 1; newest >= b_.stored; newest -= 32) {
      const int j = newest - lane_;
      const bool active = j >= b_.stored;
      float sum = active ? factor_[j] : 0.0f;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const float newer = __shfl_up_sync(kAllLanes, sum, d);
        if (lane_ >= d) sum += newer;
      }
      const float before = __shfl_up_sync(kAllLanes, sum, 1);
      if (active) coefficient_[j] *= strength_[j] * expf(carried + (lane_ > 0 ? before : 0.0f));
      carried += __shfl_sync(kAllLanes, sum, 31);
    }
    const float decay = expf(carried);
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) t[e] *= decay;
  }

  // The delta rule: every row changes the query. A scalar decay of all newer rows is kept apart.
  __device__ void walk_back(int head, float (&t)[kPerLane]) {
    const int lane = lane_ % kRowLanes;
    float newer = 1;
#pragma unroll 1
    for (int j = b_.rows - 1; j >= b_.stored; --j) {
      float k[kPerLane];
      rows_.template key<Map>(j, lane, k);
      const float factor = factor_[j], strength = strength_[j];
      const float c = strength * (factor * row_sum(dot<4>(k, t)));
      const float step = -c * factor;
      if (lane_ == 0) coefficient_[j] = newer * c;
      if constexpr (kFamily == Family::kKimiDelta) {
        float a[kPerLane];
        rows_.template decays<Map>(head, j, lane, a);
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) t[e] = a[e] * fmaf(step, k[e], t[e]);
      } else {
        newer *= decay_[j];
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) t[e] = fmaf(step, k[e], t[e]);
      }
    }
    if constexpr (kFamily != Family::kKimiDelta) {
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) t[e] *= newer;
    }
  }

  // outputs = sum over rows from `first` on of c_j v_j.
  __device__ void mix(int first, int begin, int end) const {
    constexpr int kElems = 4 / sizeof(Act) > 1 ? 2 : 1;
#pragma unroll 1
    for (int column = begin + lane_ * kElems; column < end; column += 32 * kElems) {
      float sum[kElems] = {};
#pragma unroll 4
      for (int j = first; j < b_.rows; ++j) {
        float v[kElems];
        load_elements<Act, kElems>(rows_.values(j) + column, v);
#pragma unroll
        for (int e = 0; e < kElems; ++e) sum[e] = fmaf(coefficient_[j], v[e], sum[e]);
      }
#pragma unroll
      for (int e = 0; e < kElems; ++e) rows_.outputs()[column + e] = sum[e];
    }
    __syncwarp();
  }

  const RecurrentStepParams& p_;
  const BlockPlace& b_;
  const Rows& rows_;
  const int lane_;
  float *const strength_, *const decay_, *const factor_, *const coefficient_, *const target_;
  uint16_t* const parts_;
};

}  // namespace replayssm::cuda
