// What a block forms of ring and window: per value head and token the vector that meets the state,
// and what each row adds to the output.
#pragma once

#include "ops/cuda/step_fetch.cuh"
#include "ops/cuda/step_parts.cuh"

namespace replayssm::cuda {

// Read: the type of the states that meet the vectors, where the tensor cores take them; else void.
template <Family kFamily, class Act, class Read, int kState, bool kMany>
class BlockHeads {
 public:
  using Shared = BlockShared<kFamily, Act, kState>;
  using Fetch = RowFetch<kFamily, Act, kState>;
  using Map = RowMap<Act, kState>;
  static constexpr int kPerLane = Shared::kPerLane;

  __device__ BlockHeads(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                        const Shared& shared)
      : p_(p),
        b_(b),
        shared_(shared),
        heads_(launch.config.heads),
        warps_(launch.config.warps),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        row_lane_(threadIdx.x % kRowLanes),
        group_(threadIdx.x % 32 / kRowLanes) {}

  // Brings gates to shared memory, a warp per head, a lane per row; a barrier must follow.
  __device__ void store_gates(const Fetch& fetch) const {
#pragma unroll 1
    for (int head = warps_ - 1 - warp_; head < heads_; head += warps_)
#pragma unroll 1
      for (int j = lane_; j < b_.rows; j += 32) {
        const auto gates = fetch.gates(head, j);
        shared_.strengths(head)[j] = gates.b;
        if constexpr (kFamily != Family::kKimiDelta) shared_.decays(head)[j] = expf(gates.g);
        if constexpr (kFamily == Family::kMamba2) shared_.log_decays(head)[j] = gates.g;
      }
  }

  // All threads of the block call; a barrier must follow.
  __device__ void prepare() const {
    if constexpr (kFamily == Family::kMamba2) {
      multiply_keys();
      weigh_rows();
      keep_queries();
    } else {
      key_factors();
      __syncthreads();
      walk_all();
    }
  }

 private:
  static constexpr int kGroups = 32 / kRowLanes;

  __device__ int window() const { return kMany ? b_.window : 1; }

  __device__ void load(const Act* row, float (&x)[kPerLane]) const {
    Shared::template load_key<Act>(row, row_lane_, x);
  }

  // Token i and its ancestors in the window, a bit each.
  __device__ uint32_t path(int i) const {
    if constexpr (!kMany) return 1;
    if (!p_.batch.parent) return (2u << i) - 1;
    uint32_t mask = 0;
    while (i >= 0) {
      mask |= 1u << i;
      const int parent = p_.batch.parent[b_.token + i];
      i = parent < i ? parent : -1;  // a wrong one ends the path
    }
    return mask;
  }

  // Groups of eight lanes take a row each.
  __device__ void multiply_keys() const {
    if (b_.window == 0) return;
#pragma unroll 1
    for (int first = b_.first_mixed() + warp_ * kGroups; first < b_.rows;
         first += warps_ * kGroups) {
      const int j = min(first + group_, b_.rows - 1);
      float k[kPerLane];
      load(shared_.key(j), k);
#pragma unroll 1
      for (int i = 0; i < window(); ++i) {
        float q[kPerLane];
        load(shared_.query(i), q);
        const float product = row_sum(dot<4>(k, q));
        if (row_lane_ == 0 && first + group_ < b_.rows) shared_.products(j)[i] = product;
      }
    }
  }

  // Mamba-2: strengths and decays from each row to each token, a warp per head and token, a lane
  // per row.
  __device__ void weigh_rows() const {
#pragma unroll 1
    for (int n = warp_; n < heads_ * b_.window; n += warps_) {
      const int head = kMany ? n / b_.window : n, i = kMany ? n - head * b_.window : 0;
      __syncwarp();
      if (b_.reads_after) {
        if (lane_ == 0) shared_.output_scale(head, i) = 1;
      } else {
        weigh_history(head, i, weigh_window(head, i));
      }
    }
  }
  // A lane per token of the window. Returns the log decay of token i and its ancestors there.
  __device__ float weigh_window(int head, int i) const {
    const uint32_t mask = path(i);
    const float* const log_decays = shared_.log_decays(head) + b_.history;
    float sum = 0, newer = 0;  // of all, and of those behind this lane's
#pragma unroll 1
    for (int node = window() - 1; node >= 0; --node) {
      if (!(mask >> node & 1)) continue;
      sum += log_decays[node];
      if (node > lane_) newer = sum;
    }
    if (lane_ < window()) {
      const int j = b_.history + lane_;
      const bool on = mask >> lane_ & 1;
      shared_.coefficients(head, j)[i] = on ? shared_.strengths(head)[j] * expf(newer) : 0.0f;
    }
    return sum;
  }
  __device__ void weigh_history(int head, int i, float carried) const {
    const int begin = b_.first_mixed();
#pragma unroll 1
    for (int newest = b_.history - 1; newest >= begin; newest -= 32) {
      const int j = newest - lane_;
      const bool active = j >= begin;
      float sum = active ? shared_.log_decays(head)[j] : 0.0f;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const float newer = __shfl_up_sync(kAllLanes, sum, d);
        if (lane_ >= d) sum += newer;
      }
      const float before = __shfl_up_sync(kAllLanes, sum, 1);
      if (active)
        shared_.coefficients(head, j)[i] =
            shared_.strengths(head)[j] * expf(carried + (lane_ > 0 ? before : 0.0f));
      carried += __shfl_sync(kAllLanes, sum, 31);
    }
    if (lane_ == 0) shared_.output_scale(head, i) = expf(carried);
  }

  // Mamba-2's heads share the queries.
  __device__ void keep_queries() const {
#pragma unroll 1
    for (int first = warp_ * kGroups; first < b_.window; first += warps_ * kGroups) {
      const int i = min(first + group_, b_.window - 1);
      float t[kPerLane];
      load(shared_.query(i), t);
      keep(0, i, first + group_ < b_.window, t);
    }
  }
  // A vector that is to meet the states. keeps: this lane stores it.
  __device__ void keep(int head, int i, bool keeps, float (&t)[kPerLane]) const {
    if constexpr (!std::is_void_v<Read>) {
      if (b_.replayed == 0) return split(head, i, keeps, t);
    }
    if (keeps) store_padded<Map>(shared_.target(head, i), row_lane_, t);
  }
  __device__ void split(int head, int i, bool keeps, float (&t)[kPerLane]) const {
    using Target = Parts<Read, kState>;
    float most = 0, inverse;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) most = fmaxf(most, fabsf(t[e]));
    const float scale = Target::scale(row_max(most), inverse);
    if (!keeps) return;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) t[e] *= scale;
#pragma unroll
    for (int e = 0; e < kPerLane; e += 2)
      Target::store(shared_.parts(head, i, Target::kStride),
                    Map::element(e / Map::kElems, row_lane_) + e % Map::kElems, t[e], t[e + 1]);
    if (row_lane_ == 0) shared_.part_scale(head, i) = inverse;
  }

  // The delta rule's 1 / |k| and 1 / |q|.
  __device__ void key_factors() const {
    const int count = b_.rows + b_.window;
#pragma unroll 1
    for (int first = warp_ * kGroups; first < count; first += warps_ * kGroups) {
      const int n = min(first + group_, count - 1);
      const bool is_query = n >= b_.rows;
      float k[kPerLane];
      // As fp32 rows lie in lanes, whatever the activations: the bits of a length are the same
      // everywhere.
      Shared::template load_key<float>(is_query ? shared_.query(n - b_.rows) : shared_.key(n),
                                       row_lane_, k);
      const float factor = 1.0f / sqrtf(row_sum(dot<4>(k, k)) + kL2NormEps);
      if (row_lane_ != 0 || first + group_ >= count) continue;
      if (is_query) {
        shared_.query_factors()[n - b_.rows] = factor;
      } else {
        shared_.key_factors()[n] = factor;
      }
    }
  }

  // Groups of eight lanes walk the query of a head and a token back through its ancestors.
  __device__ void walk_all() const {
    const int count = heads_ * b_.window;
#pragma unroll 1
    for (int first = warp_ * kGroups; first < count; first += warps_ * kGroups) {
      const int n = min(first + group_, count - 1);
      const int head = kMany ? n / b_.window : n, i = kMany ? n - head * b_.window : 0;
      float t[kPerLane];
      load(shared_.query(i), t);
      const float scale = shared_.query_factors()[i] * (1.0f / sqrtf(kState));
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) t[e] *= scale;
      if (!b_.reads_after) walk_back(head, i, row_lane_ == 0 && first + group_ < count, t);
      keep(head, i, first + group_ < count, t);
    }
  }

  // keeps: this lane stores what rows add.
  __device__ void walk_back(int head, int i, bool keeps, float (&t)[kPerLane]) const {
    const uint32_t mask = path(i);
    float newer = 1;  // a scalar decay of all newer rows is kept apart
#pragma unroll 1
    for (int node = window() - 1; node >= 0; --node)
      step_back(head, i, b_.history + node, mask >> node & 1, keeps, t, newer);
#pragma unroll 1
    for (int j = b_.history - 1; j >= b_.replayed; --j)
      step_back(head, i, j, true, keeps, t, newer);
    if constexpr (kFamily != Family::kKimiDelta) {
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) t[e] *= newer;
    }
  }
  // Rows that are not on the path have no effect.
  __device__ void step_back(int head, int i, int j, bool on, bool keeps, float (&t)[kPerLane],
                            float& newer) const {
    float k[kPerLane];
    load(shared_.key(j), k);
    const float factor = shared_.key_factors()[j],
                strength = on ? shared_.strengths(head)[j] : 0.0f;
    const float c = strength * (factor * row_sum(dot<4>(k, t)));
    const float step = -c * factor;
    if (keeps) shared_.coefficients(head, j)[i] = newer * c;
    if constexpr (kFamily == Family::kKimiDelta) {
      float a[kPerLane];
      load_padded<Map>(shared_.channel_decays(head, j), row_lane_, a);
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) t[e] = (on ? a[e] : 1.0f) * fmaf(step, k[e], t[e]);
    } else {
      if (on) newer *= shared_.decays(head)[j];
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) t[e] = fmaf(step, k[e], t[e]);
    }
  }

  const RecurrentStepParams& p_;
  const BlockPlace& b_;
  const Shared& shared_;
  const int heads_, warps_, warp_, lane_, row_lane_, group_;
};

}  // namespace replayssm::cuda
