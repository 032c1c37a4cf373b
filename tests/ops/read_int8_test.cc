// Products of bytes in the place of those of floats, where the machine has them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "ops/cpu/recurrent_read_int8.h"

namespace replayssm::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class ReadInt8 : public ::testing::TestWithParam<int64_t> {
 protected:
  ReadInt8() : codes_(kRows * state_dim_), scale_(kRows) {
    std::mt19937 random(7);
    std::uniform_int_distribution<int> code(-127, 127);
    std::normal_distribution<float> normal;
    for (int8_t& x : codes_) x = static_cast<int8_t>(code(random));
    for (float& x : scale_) x = std::exp(normal(random));
    for (int64_t i = 0; i < state_dim_; ++i) t_[i] = normal(random);
  }

  // Outputs that begin with one each; skips where there are no products of bytes.
  std::vector<float> read() {
    std::vector<float> o(kRows, 1.0f);
    Prefetcher prefetcher;
    if (!read_int8({codes_.data(), scale_.data(), kRows, state_dim_}, t_.data(), o.data(),
                   prefetcher))
      reads_ = false;
    return o;
  }
  // The same in double, and the sum of its terms' magnitudes.
  std::pair<double, double> exact(int64_t row) const {
    double sum = 0, size = 0;
    for (int64_t i = 0; i < state_dim_; ++i) {
      const double term = double{scale_[row]} * codes_[row * state_dim_ + i] * t_[i];
      sum += term;
      size += std::abs(term);
    }
    return {1 + sum, 1 + size};
  }
  void expect_exact() {
    const std::vector<float> o = read();
    if (!reads_) GTEST_SKIP() << "no products of bytes here";
    float largest = 0;
    for (const float x : t_) largest = std::max(largest, std::abs(x));
    for (int64_t row = 0; row < kRows; ++row) {
      const auto [expected, size] = exact(row);
      // Half a 2^-22.99th of the largest element in every column, and float's own rounding.
      const double unit = double{scale_[row]} * 127 * state_dim_ * largest * 0x1p-23 / 2;
      EXPECT_NEAR(o[row], expected, unit + size * 0x1p-22) << "row " << row;
    }
  }

  static constexpr int64_t kRows = 11;  // four at a time, and three alone
  const int64_t state_dim_ = GetParam();
  alignas(64) std::array<float, 256> t_{};  // as scratch memory is
  std::vector<int8_t> codes_;
  std::vector<float> scale_;
  bool reads_ = true;
};

INSTANTIATE_TEST_SUITE_P(Columns, ReadInt8,
                         ::testing::Values(1, 7, 48, 64, 80, 112, 128, 192, 200, 256));

TEST_P(ReadInt8, IsTheProductInDouble) { expect_exact(); }

TEST_P(ReadInt8, TakesTheLargestCodesAndElements) {
  for (int8_t& x : codes_) x = -127;
  for (int64_t i = 0; i < state_dim_; ++i) t_[i] = i % 2 == 0 ? 3e30f : 2.9999e30f;
  expect_exact();
}

TEST_P(ReadInt8, TakesElementsOfAllSizesAndNone) {
  for (int64_t i = 0; i < state_dim_; ++i) t_[i] = std::ldexp(t_[i], static_cast<int>(-3 * i));
  expect_exact();
  std::ranges::fill(t_, 0.0f);
  expect_exact();
}

TEST_P(ReadInt8, LosesNoNaN) {
  t_[state_dim_ / 2] = kNaN;
  scale_[3] = 0;
  const std::vector<float> o = read();
  if (!reads_) GTEST_SKIP() << "no products of bytes here";
  for (const float x : o) EXPECT_TRUE(std::isnan(x));
}

TEST_P(ReadInt8, KeepsRowsApart) {
  const std::vector<float> before = read();
  if (!reads_) GTEST_SKIP() << "no products of bytes here";
  scale_[5] = kNaN;
  const std::vector<float> o = read();
  for (int64_t row = 0; row < kRows; ++row) {
    if (row == 5) {
      EXPECT_TRUE(std::isnan(o[row]));
    } else {
      EXPECT_EQ(o[row], before[row]);
    }
  }
}

TEST(ReadInt8Refuses, MoreColumnsThanItsSumsHold) {
  const std::vector<int8_t> codes(257, 1);
  const std::vector<float> t(272, 1.0f);
  const float scale = 1;
  float o = 5;
  Prefetcher prefetcher;
  EXPECT_FALSE(read_int8({codes.data(), &scale, 1, 257}, t.data(), &o, prefetcher));
  EXPECT_EQ(o, 5);
}

}  // namespace
}  // namespace replayssm::cpu
