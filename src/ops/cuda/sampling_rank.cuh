// The order of a vocabulary's tokens as a number, digit by digit.
#pragma once

#include <cstdint>

namespace replayssm::cuda {

inline constexpr int kDigitBits = 11, kBins = 1 << kDigitBits;

// Where an element stands in the order: the higher, the earlier.
struct Rank {
  uint64_t value = 0;
  uint32_t id = 0;

  __device__ friend bool operator<(const Rank& a, const Rank& b) {
    return a.value != b.value ? a.value < b.value : a.id < b.id;
  }
  // Digits from the highest: those of the value, then those of the id.
  static constexpr int kValueDigits = (64 + kDigitBits - 1) / kDigitBits,
                       kDigits = kValueDigits + 3;
  __device__ static int shift(int digit) {
    return (digit < kValueDigits ? kValueDigits : kDigits) * kDigitBits - (digit + 1) * kDigitBits;
  }
  __device__ uint32_t digit(int n) const {
    const uint64_t word = n < kValueDigits ? value : id;
    return static_cast<uint32_t>(word >> shift(n)) & (kBins - 1);
  }
  __device__ void set_digit(int n, uint32_t digit) {
    if (n < kValueDigits) {
      value |= uint64_t{digit} << shift(n);
    } else {
      id |= digit << shift(n);
    }
  }
  // Whether the digits before n are those of `other`.
  __device__ bool same_before(int n, const Rank& other) const {
    if (n <= kValueDigits) return n == 0 || (value ^ other.value) >> shift(n - 1) == 0;
    return value == other.value && uint64_t{id ^ other.id} >> shift(n - 1) == 0;
  }
};

__device__ inline Rank rank_of(double x, int id) {
  const auto bits = static_cast<uint64_t>(__double_as_longlong(x + 0.0));  // -0 is 0
  return {bits >> 63 ? ~bits : bits | uint64_t{1} << 63, ~static_cast<uint32_t>(id)};
}
__device__ inline double value_of(const Rank& r) {
  const uint64_t bits = r.value >> 63 ? r.value & ~(uint64_t{1} << 63) : ~r.value;
  return __longlong_as_double(static_cast<long long>(bits));
}

}  // namespace replayssm::cuda
