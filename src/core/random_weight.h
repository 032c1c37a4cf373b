// Numbers for weights that nobody has trained: uniform, of a standard deviation of 0.02, bfloat16.
// Each is a function of its position alone: any part of them is the same wherever it is computed.
#pragma once

#include <cstdint>

namespace replayssm {

// Of four weights: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators").
constexpr uint64_t random_weight_bits(uint64_t four) {
  uint64_t x = (four + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Of one: 16 of those bits, the first one's the lowest. To be rounded to bfloat16.
constexpr int16_t random_weight_part(uint64_t bits, int which) {
  return static_cast<int16_t>(bits >> (16 * which));
}
constexpr float random_weight(int16_t part) { return static_cast<float>(part) * (0.035f / 32768); }

}  // namespace replayssm
