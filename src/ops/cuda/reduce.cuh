// Sums over the eight lanes that share a row. The order of the additions is fixed: a lane's own
// products as `dot` adds them, then lanes four, two and one apart. Every route uses it, so that the
// bits of a state do not depend on how a kernel was launched.
#pragma once

namespace replayssm::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

// The sum over a row's lanes, in each of them.
__device__ inline float row_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, 4));
  x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, 2));
  return __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, 1));
}

__device__ inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 4));
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
}

// Two rows reduced together: lanes 0 .. 3 of a row's eight get the sum of x[0], the others that of
// x[1]. Same bits as row_sum.
__device__ inline float row_sum_pair(const float (&x)[2], int lane) {
  const bool upper = lane & 4;
  const float kept = upper ? x[1] : x[0], sent = upper ? x[0] : x[1];
  float sum = __fadd_rn(kept, __shfl_xor_sync(kAllLanes, sent, 4));
  sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 2));
  return __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 1));
}

// The same, both sums in every lane.
__device__ inline void row_sums(float (&x)[2], int lane) {
  const float mine = row_sum_pair(x, lane), other = __shfl_xor_sync(kAllLanes, mine, 4);
  x[0] = lane & 4 ? other : mine;
  x[1] = lane & 4 ? mine : other;
}

// Four rows reduced together: a lane gets the sum of x[lane / 2]. Same bits as row_sum.
__device__ inline float row_sum_quad(const float (&x)[4], int lane) {
  const bool upper = lane & 4, odd = lane & 2;
  float pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float kept = upper ? x[2 + i] : x[i], sent = upper ? x[i] : x[2 + i];
    pair[i] = __fadd_rn(kept, __shfl_xor_sync(kAllLanes, sent, 4));
  }
  const float kept = odd ? pair[1] : pair[0], sent = odd ? pair[0] : pair[1];
  const float sum = __fadd_rn(kept, __shfl_xor_sync(kAllLanes, sent, 2));
  return __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 1));
}

// The same, all four sums in every lane.
__device__ inline void row_sums(float (&x)[4], int lane) {
  const float mine = row_sum_quad(x, lane);
#pragma unroll
  for (int r = 0; r < 4; ++r) x[r] = __shfl_sync(kAllLanes, mine, 2 * r, 8);
}

// A lane's share of a product, in kChains interleaved sums that hide each other's latency.
template <int kChains = 2, int kCount>
__device__ inline float dot(const float (&x)[kCount], const float (&y)[kCount]) {
  static_assert(kCount % kChains == 0);
  float sum[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum[i] = __fmul_rn(x[i], y[i]);
#pragma unroll
  for (int i = kChains; i < kCount; ++i) sum[i % kChains] = __fmaf_rn(x[i], y[i], sum[i % kChains]);
#pragma unroll
  for (int n = kChains / 2; n > 0; n /= 2)
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i] = __fadd_rn(sum[i], sum[i + n]);
  return sum[0];
}

}  // namespace replayssm::cuda
