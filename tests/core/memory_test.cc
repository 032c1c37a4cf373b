#include "core/memory.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/half.h"
#include "core/random_weight.h"

namespace replayssm {
namespace {

std::vector<float> weights(uint64_t first, int64_t count) {
  std::vector<float> x(static_cast<size_t>(count));
  host_memory().write_random(x.data(), DType::kFloat32, first, count);
  return x;
}

TEST(RandomWeights, AreUniformAndAsLargeAsThoseOfModels) {
  constexpr int64_t kCount = 100000;
  double sum = 0, squares = 0, fourth = 0, neighbours = 0;
  float before = 0;
  for (const float w : weights(0, kCount)) {
    EXPECT_LE(std::abs(w), 0.0352f);
    sum += w, squares += w * w, fourth += w * w * w * w, neighbours += w * before;
    before = w;
  }
  const double variance = squares / kCount, deviation = std::sqrt(variance);
  EXPECT_NEAR(deviation, 0.035 / std::sqrt(3), 2e-4);
  EXPECT_NEAR(sum / kCount, 0, 4 * deviation / std::sqrt(kCount));
  EXPECT_NEAR(fourth / kCount / (variance * variance), 9.0 / 5, 0.02);  // of a uniform one
  EXPECT_NEAR(neighbours / kCount / variance, 0, 4 / std::sqrt(kCount));
}

// Whatever part is asked for, in whatever type.
TEST(RandomWeights, AreFunctionsOfTheirPosition) {
  const auto all = weights(1000, 50);
  for (int64_t first = 0; first < 50; ++first) {
    for (int64_t count = 0; first + count <= 50; ++count) {
      const std::vector<float> part(all.begin() + first, all.begin() + first + count);
      ASSERT_EQ(weights(1000 + static_cast<uint64_t>(first), count), part);
    }
  }
  for (uint64_t i = 0; i < 50; ++i) {
    const uint64_t position = 1000 + i;
    const uint64_t bits = random_weight_bits(position / 4);
    const int16_t part = random_weight_part(bits, static_cast<int>(position % 4));
    EXPECT_EQ(all[i], rounded<bf16>(random_weight(part)));
  }
  std::vector<bf16> narrow(50);
  host_memory().write_random(narrow.data(), DType::kBFloat16, 1000, 50);
  for (size_t i = 0; i < 50; ++i) EXPECT_EQ(to_float(narrow[i]), all[i]);
}

}  // namespace
}  // namespace replayssm
