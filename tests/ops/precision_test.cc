// Emulated storage formats against the definition of their values.
#include "ops/cpu/precision.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "ops/reference/number_format.h"

namespace replayssm::cpu {
namespace {

Precision precision(const char* text) { return parse_precision(text).value(); }

std::vector<float> random_row(uint32_t seed, int64_t columns) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> row(columns);
  for (float& value : row)
    value = normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 20) - 10);
  return row;
}

TEST(Precision, NamesAreReadAsTheyAreWritten) {
  for (const char* text : {"float32", "float16", "bfloat16", "e4m3", "e2m1", "int4", "int8",
                           "int16", "int4/32", "e2m1/16-sr", "bfloat16-sr", "int5-sr"})
    EXPECT_EQ(precision_name(precision(text)), text);
  for (const char* text : {"", "int", "int3", "int17", "int8/", "int8/0", "int8/x", "fp8", "e4m3-s",
                           "bfloat16/16", "float32-sr", "int8-sr/16", "-sr"})
    EXPECT_FALSE(parse_precision(text)) << text;
}

// Formats that read copies have give their values, bit for bit.
TEST(Precision, EqualsTheStoredFormats) {
  for (const auto& [text, dtype] : {std::pair{"float16", DType::kFloat16},
                                    {"bfloat16", DType::kBFloat16},
                                    {"e4m3", DType::kFloat8E4M3},
                                    {"int8", DType::kInt8},
                                    {"float32", DType::kFloat32}}) {
    for (uint32_t seed = 0; seed < 50; ++seed) {
      auto row = random_row(seed, 1 + seed);
      if (seed == 49) std::ranges::fill(row, 0.0f);
      const auto encoded = reference::encode_row(dtype, row);
      const auto want = reference::decode_row(dtype, encoded);
      round_row(precision(text), {}, row);
      for (size_t i = 0; i < row.size(); ++i)
        EXPECT_EQ(row[i], static_cast<float>(want[i])) << text << " " << seed << " " << i;
    }
  }
}

// All values of the formats that have no code of their own, scaled so that the largest is largest.
TEST(Precision, SmallFormatsHaveTheirValues) {
  std::vector<std::pair<const char*, std::vector<float>>> formats{
      {"e2m1", {0, 0.5f, 1, 1.5f, 2, 3, 4, 6}}, {"int4", {0, 1, 2, 3, 4, 5, 6, 7}}};
  for (const auto& [text, values] : formats) {
    const float largest = values.back();
    for (float x = -largest; x <= largest; x += 1.0f / 64) {
      std::vector<float> row{largest, x};
      round_row(precision(text), {}, row);
      double distance = 1e9;
      for (const float value : values)
        distance = std::min(distance, std::abs(double{value} - std::abs(x)));
      EXPECT_EQ(std::abs(double{row[1]} - x), distance) << text << " " << x;
      EXPECT_EQ(row[0], largest);
    }
  }
  std::vector<float> ties{6, 0.25f, 0.75f, 1.25f, 2.5f, 3.5f, 5};
  round_row(precision("e2m1"), {}, ties);
  EXPECT_EQ(ties, (std::vector<float>{6, 0, 1, 1, 2, 4, 4}));
}

// A block's error is bounded by its own largest value.
TEST(Precision, BlocksHaveTheirOwnScales) {
  for (const int bits : {4, 6, 8, 12, 16}) {
    for (const int64_t block : {16, 32}) {
      auto row = random_row(bits, 72);
      const auto exact = row;
      round_row(precision(("int" + std::to_string(bits) + "/" + std::to_string(block)).c_str()), {},
                row);
      for (size_t i = 0; i < row.size(); ++i) {
        float largest = 0;
        for (size_t j = i / block * block; j < std::min(row.size(), (i / block + 1) * block); ++j)
          largest = std::max(largest, std::abs(exact[j]));
        const double step = largest / ((1 << (bits - 1)) - 1);
        EXPECT_LE(std::abs(row[i] - exact[i]), step * (0.5 + 0x1p-7)) << bits << "/" << block;
      }
    }
  }
}

// Between the two neighbours, equal to one of them, on average the value.
TEST(Precision, StochasticRoundingIsUnbiased) {
  constexpr int kTrials = 4000;
  for (const char* text :
       {"float16-sr", "bfloat16-sr", "e4m3-sr", "e2m1/4-sr", "int8-sr", "int4-sr"}) {
    const std::vector<float> exact{1.0f, 0.3f, -0.77f, 0.013f, 0.0f, 0.501f};
    std::vector<double> mean(exact.size());
    std::vector<float> low(exact.size(), 1e9f), high(exact.size(), -1e9f);
    for (int trial = 0; trial < kTrials; ++trial) {
      auto row = exact;
      const RowRandom random{.seed = 5, .position = trial, .stream = 1, .row = 3};
      round_row(precision(text), random, row);
      auto again = exact;
      round_row(precision(text), random, again);
      EXPECT_EQ(row, again);
      for (size_t i = 0; i < row.size(); ++i) {
        mean[i] += row[i] / double{kTrials};
        low[i] = std::min(low[i], row[i]);
        high[i] = std::max(high[i], row[i]);
      }
    }
    for (size_t i = 0; i < exact.size(); ++i) {
      EXPECT_LE(low[i], exact[i] + 1e-7f) << text;
      EXPECT_GE(high[i], exact[i] - 1e-7f) << text;
      // Five deviations of the mean of draws that are at most half the gap off.
      EXPECT_NEAR(mean[i], exact[i], 5 * (high[i] - low[i]) / 2 / std::sqrt(double{kTrials}) + 1e-7)
          << text << " " << i;
    }
  }
}

}  // namespace
}  // namespace replayssm::cpu
