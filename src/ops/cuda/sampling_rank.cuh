// The order of a vocabulary's tokens as a number, digit by digit, and how it is searched.
#pragma once

#include <cstdint>

#include "ops/cuda/sampling.h"

namespace replayssm::cuda {

inline constexpr int kDigitBits = 11, kBins = 1 << kDigitBits;

// Where a token stands in the order: the higher, the earlier. The distance of its value from the
// largest, rounded down to 1/65536, comes first: unlike a float's bits it spreads over its digits.
struct Rank {
  uint32_t coarse = 0;
  uint64_t value = 0;
  uint32_t id = 0;

  __device__ friend bool operator<(const Rank& a, const Rank& b) {
    if (a.coarse != b.coarse) return a.coarse < b.coarse;
    return a.value != b.value ? a.value < b.value : a.id < b.id;
  }

  // Digits from the highest: so many of each.
  static constexpr int kCoarse = 2, kValue = 6, kId = 3, kDigits = kCoarse + kValue + kId;
  __device__ uint32_t digit(int n) const {
    const uint64_t word = n < kCoarse ? coarse : n < kCoarse + kValue ? value : id;
    return static_cast<uint32_t>(word >> shift(n)) & (kBins - 1);
  }
  __device__ void set_digit(int n, uint32_t digit) {
    if (n < kCoarse) {
      coarse |= digit << shift(n);
    } else if (n < kCoarse + kValue) {
      value |= uint64_t{digit} << shift(n);
    } else {
      id |= digit << shift(n);
    }
  }
  // Whether the digits before n are those of `other`.
  __device__ bool same_before(int n, const Rank& other) const {
    if (n == 0) return true;
    const int s = shift(n - 1);
    if (n <= kCoarse) return (coarse ^ other.coarse) >> s == 0;
    if (coarse != other.coarse) return false;
    if (n <= kCoarse + kValue) return (value ^ other.value) >> s == 0;
    return value == other.value && (id ^ other.id) >> s == 0;
  }

 private:
  __device__ static int shift(int n) {
    const int behind = n < kCoarse ? kCoarse : n < kCoarse + kValue ? kCoarse + kValue : kDigits;
    return (behind - 1 - n) * kDigitBits;
  }
};

// By value and id alone.
__device__ inline Rank rank_of(double x, int id) {
  const auto bits = static_cast<uint64_t>(__double_as_longlong(x + 0.0));  // -0 is 0
  return {0, bits >> 63 ? ~bits : bits | uint64_t{1} << 63, ~static_cast<uint32_t>(id)};
}
__device__ inline double value_of(const Rank& r) {
  const uint64_t bits = r.value >> 63 ? r.value & ~(uint64_t{1} << 63) : ~r.value;
  return __longlong_as_double(static_cast<long long>(bits));
}
__device__ inline Rank rank_of(double x, int id, double largest) {
  constexpr uint32_t kMost = (1u << Rank::kCoarse * kDigitBits) - 1;
  Rank rank = rank_of(x, id);
  rank.coarse = kMost - static_cast<uint32_t>(fmin((largest - x) * 65536, double{kMost}));
  return rank;
}

inline constexpr int kSamplerWarps = 16;

// What a block keeps in shared memory.
struct SamplerShared {
  SamplingRow sampling;
  uint64_t amount[kBins];
  uint32_t count[kBins];
  uint64_t warp_amount[kSamplerWarps];
  double warp_sum[kSamplerWarps];
  Rank best[kSamplerWarps];
  // What other blocks of the cluster read.
  Rank block_best;
  double block_sum;
  int block_flag;
  // What a search leaves.
  uint32_t digit, found_count;
  uint64_t left;
};

}  // namespace replayssm::cuda
