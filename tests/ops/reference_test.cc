// The reference against itself, written another way, and against values known from elsewhere.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <numeric>

#include "core/half.h"
#include "ops/recurrent_oracle.h"
#include "ops/reference/conv.h"
#include "ops/reference/number_format.h"

namespace replayssm::testing {
namespace {

TEST(ReferenceRecurrence, WalkingBackEqualsReadingTheNewState) {
  for (const Case& c : cases()) {
    const int64_t tokens = 21;
    const auto in = random_inputs(c, tokens, 5);
    std::vector<double> state(c.shape.head_dim * c.shape.state_dim), start;
    std::vector<reference::Token> history;
    std::iota(state.begin(), state.end(), -3.0);
    start = state;
    for (int64_t t = 0; t < tokens; ++t) {
      history.push_back(token_of(c, in, t, 0));
      reference::update(c.shape.family, history.back(), state);
    }
    EXPECT_LT(relative_error(reference::read_through(c.shape.family, history, start),
                             reference::read(c.shape.family, history.back(), state)),
              1e-12)
        << name(c);
  }
}

// One column and one row by hand: Kimi Delta with decay 1/2 of a state of 8, a unit key (but for
// the epsilon of its norm) that erases 3/4 of what is known and writes 3/4 of 2, and a query along
// it.
TEST(ReferenceRecurrence, OneTokenByHand) {
  const reference::Token token{.v = {2}, .k = {100}, .q = {100}, .g = {std::log(0.5)}, .b = 0.75};
  std::vector<double> state{8};
  for (const Family family : {Family::kGatedDelta, Family::kKimiDelta}) {
    state = {8};
    reference::update(family, token, state);
    EXPECT_NEAR(state[0], 4 - 0.75 * 4 + 0.75 * 2, 1e-8);
    EXPECT_NEAR(reference::read(family, token, state)[0], 2.5, 1e-8);
  }
  state = {8};
  reference::update(Family::kMamba2, token, state);
  EXPECT_NEAR(state[0], 4 + 0.75 * 2 * 100, 1e-12);
}

TEST(ReferenceTree, PathsFollowParents) {
  const std::vector<int32_t> parent{-1, 0, 0, 2, -1};
  EXPECT_EQ(reference::path_to(parent, 3), (std::vector<int64_t>{0, 2, 3}));
  EXPECT_EQ(reference::path_to(parent, 4), (std::vector<int64_t>{4}));
}

TEST(ReferenceConv, TapsFollowParentsThenCommittedInputs) {
  const std::vector<double> weight{1000, 100, 10, 1}, committed{1, 2}, window{3, 4, 5};
  const std::vector<int32_t> parent{-1, 0, 0};
  const auto silu = [](double x) { return x / (1 + std::exp(-x)); };
  EXPECT_EQ(reference::causal_conv(weight, 0, committed, window, parent, 2),
            silu(1235 - 1235 + 1000 + 200 + 30 + 5));
  EXPECT_EQ(reference::causal_conv(weight, 0, committed, window, parent, 0),
            silu(0 + 100 + 20 + 3));
}

TEST(ReferenceNumbers, SixteenBitCodesAreThoseOfCore) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float half = to_float(fp16{static_cast<uint16_t>(code)});
    const float brain = to_float(bf16{static_cast<uint16_t>(code)});
    if (std::isfinite(half)) {
      EXPECT_EQ(reference::decode(DType::kFloat16, code), half);
    }
    if (std::isfinite(brain)) {
      EXPECT_EQ(reference::decode(DType::kBFloat16, code), brain);
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const auto x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isnan(x)) continue;
    EXPECT_EQ(reference::encode(DType::kFloat16, x), from_float<fp16>(x).bits) << x;
    EXPECT_EQ(reference::encode(DType::kBFloat16, x), from_float<bf16>(x).bits) << x;
  }
}

TEST(ReferenceNumbers, EightBitCodesHaveTheirPublishedValues) {
  constexpr auto e4m3 = DType::kFloat8E4M3;
  EXPECT_EQ(reference::decode(e4m3, 0x7e), 448);
  EXPECT_EQ(reference::decode(e4m3, 0x08), 0x1p-6);  // smallest normal
  EXPECT_EQ(reference::decode(e4m3, 0x07), 0.875 * 0x1p-6);
  EXPECT_EQ(reference::decode(e4m3, 0x01), 0x1p-9);  // smallest of all
  EXPECT_EQ(reference::decode(e4m3, 0xb8), -1);
  EXPECT_EQ(reference::encode(e4m3, 17), 0x58);  // between 16 and 18: the even code
  EXPECT_EQ(reference::encode(e4m3, 19), 0x5a);  // between 18 and 20
  EXPECT_EQ(reference::encode(e4m3, 448.1), 0x7e);
  EXPECT_EQ(reference::encode(e4m3, 0x1p-10), 0x00);
  EXPECT_EQ(reference::encode(DType::kInt8, -2.5), static_cast<uint8_t>(-2));
  EXPECT_EQ(reference::encode(DType::kInt8, 3.5), 4u);
  EXPECT_EQ(reference::encode(DType::kInt8, 127.5), 127u);
}

// A search through all codes finds none that is nearer.
TEST(ReferenceNumbers, EncodersFindTheNearestValue) {
  std::mt19937 random(2);
  std::normal_distribution<double> normal(0, 100);
  for (const DType dtype : {DType::kFloat8E4M3, DType::kInt8}) {
    for (int i = 0; i < 3000; ++i) {
      const double x = std::clamp(normal(random), -127.0, 127.0) / (i % 3 == 0 ? 1000 : 1);
      double nearest = std::numeric_limits<double>::infinity();
      for (uint32_t code = 0; code < 256; ++code) {
        if (dtype == DType::kFloat8E4M3 && (code & 0x7f) == 0x7f) continue;  // NaN
        nearest = std::min(nearest, std::abs(reference::decode(dtype, code) - x));
      }
      EXPECT_EQ(std::abs(reference::decode(dtype, reference::encode(dtype, x)) - x), nearest) << x;
    }
  }
}

TEST(ReferenceNumbers, RowsAreScaledByTheirLargestValue) {
  for (const DType dtype : {DType::kFloat8E4M3, DType::kInt8}) {
    const std::vector<float> row{0.5f, -3.0f, 0.0f, 1e-6f};
    const auto encoded = reference::encode_row(dtype, row);
    EXPECT_EQ(encoded.scale, 3.0f / dtype_max_8bit(dtype));
    const auto decoded = reference::decode_row(dtype, encoded);
    EXPECT_NEAR(decoded[1], -3, 1e-6);
    EXPECT_NEAR(decoded[0], 0.5, dtype == DType::kInt8 ? encoded.scale / 2 : 0.5 * 0x1p-4);
    EXPECT_EQ(reference::encode_row(dtype, std::vector<float>(5)).scale, 0);
  }
}

// All 2^16 random numbers together round up as often as the value lies far from the lower
// neighbour.
TEST(ReferenceNumbers, StochasticRoundingIsUnbiased) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const double x : {1.0 + 0x1p-9, -1.0 - 0x1p-12, 0.3, 3e-7, 1.0, 60000.1}) {
      double sum = 0, low = 1e9, high = -1e9;
      for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const double rounded = reference::decode(
            dtype, reference::encode_stochastic(dtype, x, static_cast<uint16_t>(bits)));
        sum += rounded;
        low = std::min(low, rounded);
        high = std::max(high, rounded);
      }
      EXPECT_LE(low, x);
      EXPECT_GE(high, x);
      EXPECT_NEAR(sum / 0x10000, x, (high - low) * 0x1p-16) << x;
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
