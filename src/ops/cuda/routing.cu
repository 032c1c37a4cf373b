// The choice of experts: a warp has a row, its lanes the experts that are 32 apart.

#include "core/check.h"
#include "ops/cuda/activations.cuh"
#include "ops/cuda/block_reduce.cuh"
#include "ops/cuda/check_rows.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/experts.h"

namespace replayssm::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kMostPerLane = kMaxExperts / 32;

// Whether (x, i) comes before (y, j): the larger value, ties to the lower index.
__device__ inline bool before(float x, int i, float y, int j) { return x > y || (x == y && i < j); }

template <int kPerLane>
class RowRouter {
 public:
  // shared: [experts] and [groups] floats of this warp.
  __device__ RowRouter(const RouterParams& p, float* shared)
      : p_(p),
        lane_(static_cast<int>(threadIdx.x) % 32),
        experts_(static_cast<int>(p.experts)),
        groups_(static_cast<int>(p.groups)),
        choices_(shared),
        group_(shared + experts_) {}

  __device__ void route(int64_t row) {
    score(row);
    if (p_.top_groups < p_.groups) drop_groups();
    int32_t* expert = p_.expert + row * p_.top_k;
    float* weight = p_.weight + row * p_.top_k;
    const int count = static_cast<int>(p_.top_k);
    float mine = 0, sum = 0;  // lane k keeps the k-th
    int chosen = 0;
    for (int k = 0; k < count; ++k) {
      const int best = take_best();
      const float value = __shfl_sync(kAllLanes, score_of(best), best % 32);
      if (lane_ == k) mine = value, chosen = best;
      sum += value;
    }
    const float factor = p_.renormalize ? p_.scale / (sum + 1e-20f) : p_.scale;
    if (lane_ >= count) return;
    expert[lane_] = chosen;
    weight[lane_] = mine * factor;
  }

 private:
  __device__ int expert(int i) const { return i * 32 + lane_; }
  // Of an expert that this lane has.
  __device__ float score_of(int expert) const {
    float x = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x = expert / 32 == i ? score_[i] : x;
    return x;
  }

  __device__ void score(int64_t row) {
    float most = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      score_[i] = expert(i) < experts_ ? p_.logits[row * p_.experts + expert(i)] : -INFINITY;
      most = fmaxf(most, score_[i]);
    }
    if (!p_.sigmoid) most = warp_max(most);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      score_[i] = p_.sigmoid ? sigmoid(score_[i]) : expf(score_[i] - most);
      if (expert(i) < experts_) sum += score_[i];
    }
    if (!p_.sigmoid) sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (!p_.sigmoid) score_[i] /= sum;
      choice_[i] = -INFINITY;
      if (expert(i) >= experts_) continue;
      const float x = score_[i] + (p_.correction_bias ? __ldg(p_.correction_bias + expert(i)) : 0);
      if (!isnan(x)) choice_[i] = x;
    }
  }

  // Takes the experts of all but the best groups out of the choice.
  __device__ void drop_groups() {
    const int size = experts_ / groups_;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (expert(i) < experts_) choices_[expert(i)] = choice_[i];
    __syncwarp();
    for (int g = lane_; g < groups_; g += 32) {
      float best = -INFINITY, second = -INFINITY;
      for (int i = g * size; i < (g + 1) * size; ++i) {
        second = fmaxf(second, fminf(best, choices_[i]));
        best = fmaxf(best, choices_[i]);
      }
      group_[g] = size == 1 ? best : best + second;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (expert(i) >= experts_) continue;
      const int own = expert(i) / size;
      int rank = 0;
      for (int g = 0; g < groups_; ++g) rank += before(group_[g], g, group_[own], own);
      if (rank >= p_.top_groups) choice_[i] = -INFINITY;
    }
    __syncwarp();
  }

  // The best expert that is left, which is left no longer.
  __device__ int take_best() {
    float best = -INFINITY;
    int at = INT32_MAX;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (!(taken_ >> i & 1) && expert(i) < experts_ && before(choice_[i], expert(i), best, at))
        best = choice_[i], at = expert(i);
    for (int d = 16; d > 0; d /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, best, d);
      const int other_at = __shfl_xor_sync(kAllLanes, at, d);
      if (before(other, other_at, best, at)) best = other, at = other_at;
    }
    if (at % 32 == lane_) taken_ |= 1u << at / 32;
    return at;
  }

  const RouterParams& p_;
  const int lane_, experts_, groups_;
  float *const choices_, *const group_;
  float score_[kPerLane], choice_[kPerLane];  // as they are, as they compete
  uint32_t taken_ = 0;
};

template <int kPerLane>
__global__ void __launch_bounds__(kThreads, 1)
    route_experts_kernel(const __grid_constant__ RouterParams p) {
  release_successor();
  extern __shared__ float shared[];
  wait_for_predecessor();
  const int64_t warp = threadIdx.x / 32, row = int64_t{blockIdx.x} * kWarps + warp;
  if (row < p.rows) RowRouter<kPerLane>(p, shared + warp * (p.experts + p.groups)).route(row);
}

}  // namespace

void route_experts(const RouterParams& p, cudaStream_t stream) {
  check_count("rows", p.rows, 0);
  if (p.experts < 1 || p.experts > kMaxExperts)
    fail("experts: expected 1 to ", kMaxExperts, ", got ", p.experts);
  if (p.groups < 1 || p.experts % p.groups != 0)
    fail("groups: expected a divisor of ", p.experts, " experts, got ", p.groups);
  if (p.top_groups < 1 || p.top_groups > p.groups)
    fail("top_groups: expected 1 to ", p.groups, ", got ", p.top_groups);
  const int64_t most = std::min<int64_t>(p.experts / p.groups * p.top_groups, kMaxTopK);
  if (p.top_k < 1 || p.top_k > most) fail("top_k: expected 1 to ", most, ", got ", p.top_k);
  if (p.rows == 0) return;
  check_pointer("logits", p.logits, sizeof(float));
  check_pointer("expert", p.expert, sizeof(int32_t));
  check_pointer("weight", p.weight, sizeof(float));
  const auto bytes = static_cast<int>(kWarps * (p.experts + p.groups) * int64_t{sizeof(float)});
  const auto start = [&](auto kernel) {
    launch_dependent("route_experts", kernel, dim3(blocks_for(p.rows, kWarps)), kThreads, bytes,
                     stream, p);
  };
  if (p.experts <= 128) return start(route_experts_kernel<4>);
  if (p.experts <= 512) return start(route_experts_kernel<16>);
  start(route_experts_kernel<kMostPerLane>);
}

}  // namespace replayssm::cuda
