// Division by numbers that the host knows before a kernel runs.
#pragma once

#include <cstdint>

namespace replayssm::cuda {

// Division of small numbers by a number known on the host.
struct FastDivide {
  uint32_t divisor = 1, magic = 0;

  constexpr FastDivide() = default;
  constexpr explicit FastDivide(uint32_t by)
      : divisor(by), magic(static_cast<uint32_t>((uint64_t{1} << 32) / by)) {}

  // x < 2^32.
  constexpr uint32_t modulo(uint32_t x) const {
    if (divisor == 1) return 0;
    const auto quotient = static_cast<uint32_t>((uint64_t{x} * magic) >> 32);
    const uint32_t rest = x - quotient * divisor;  // the quotient is at most one too small
    return rest >= divisor ? rest - divisor : rest;
  }
  constexpr uint32_t divide(uint32_t x) const {
    if (divisor == 1) return x;
    const auto quotient = static_cast<uint32_t>((uint64_t{x} * magic) >> 32);
    return quotient + (x - quotient * divisor >= divisor ? 1 : 0);
  }
  // Any x; divisor < 2^16.
  constexpr uint32_t modulo64(uint64_t x) const {
    if (x >> 32 == 0) return modulo(static_cast<uint32_t>(x));
    const uint32_t high = modulo(static_cast<uint32_t>(x >> 32));
    const uint32_t step = modulo(modulo(0xffffffffu) + 1);  // 2^32
    return modulo(high * step + modulo(static_cast<uint32_t>(x)));
  }
};

}  // namespace replayssm::cuda
