// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): a bijection of a
// 128-bit counter under a 64-bit key. Any number of the stream is computed without the others.
#pragma once

#include <array>
#include <cstdint>

namespace replayssm {

constexpr std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter,
                                         std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xd2511f53} * counter[0];
    const uint64_t right = uint64_t{0xcd9e8d57} * counter[2];
    counter = {
        static_cast<uint32_t>(right >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(right),
        static_cast<uint32_t>(left >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(left)};
    key[0] += 0x9e3779b9;
    key[1] += 0xbb67ae85;
  }
  return counter;
}

// Uniform in [0, 1), 53 bits, a function of its arguments alone. Streams are independent.
constexpr double uniform(uint64_t seed, int64_t position, uint32_t stream = 0) {
  const auto low = [](uint64_t value) { return static_cast<uint32_t>(value); };
  const auto high = [](uint64_t value) { return static_cast<uint32_t>(value >> 32); };
  const auto at = static_cast<uint64_t>(position);
  const auto bits = philox({low(at), high(at), stream, 0}, {low(seed), high(seed)});
  return static_cast<double>((uint64_t{bits[0]} << 21) ^ (bits[1] >> 11)) * 0x1p-53;
}

}  // namespace replayssm
