// Stochastic rounding of 16-bit checkpoints: the bits that ops.h promises, unbiased, and a function
// of sequence, position and element alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "ops/recurrent_harness.h"
#include "ops/recurrent_oracle.h"
#include "ops/reference/number_format.h"

namespace replayssm::testing {
namespace {

std::vector<Case> rounded_cases() {
  std::vector<Case> list;
  for (const Case& each : cases()) {
    Case c = each;
    c.rounding = 7;
    c.checkpoint = list.size() % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
    list.push_back(c);
  }
  return list;
}

class Rounding : public ::testing::TestWithParam<Case> {
 protected:
  ThreadPool threads_{2};
};

INSTANTIATE_TEST_SUITE_P(Shapes, Rounding, ::testing::ValuesIn(rounded_cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

// The same step on a float32 checkpoint of the same values shows what is rounded; the bits of the
// 16-bit checkpoint then follow from the definition.
TEST_P(Rounding, HasTheBitsOfTheDefinition) {
  const Case c = GetParam();
  Case wide = c;
  wide.checkpoint = DType::kFloat32;
  wide.rounding.reset();
  const int64_t tokens = 30;
  const auto in = random_inputs(c, tokens, 51);
  const auto& s = c.shape;
  for (const Route route : kRoutes) {
    const RingConfig ring{.buffer_len = 5, .max_window = 2};
    Pool pool(c, ring, 1), exact(wide, ring, 1);
    pool.clear(0);
    exact.clear(0);
    pool.seeds[0] = 0x123456789abcdefull;
    pool.cursors[0].ring_start += (int64_t{3} << 32) - 10;  // both words of the counter are used
    exact.cursors[0] = pool.cursors[0];
    for (int64_t t = 0; t < tokens; t += 2) {
      const auto values = pool.slot_values(0);
      const std::vector<float> start(values.begin(), values.end());
      std::memcpy(exact.slot(0).data(), start.data(), start.size() * sizeof(float));
      decode(c, pool, route, in, t, t + 2, 2, threads_);
      decode(wide, exact, route, in, t, t + 2, 2, threads_);
      const auto sum = exact.slot_values(0);
      if (std::ranges::equal(sum, start)) continue;  // nothing was stored
      const Cursor& cursor = pool.cursors[0];
      const auto* codes = reinterpret_cast<const uint16_t*>(pool.slot(0).data());
      for (int64_t i = 0; i < pool.elements(); ++i) {
        const auto bits = reference::rounding_bits(pool.seeds[0], cursor.ring_start, *c.rounding,
                                                   i / s.state_dim, i % s.state_dim, s.state_dim);
        ASSERT_EQ(codes[i], reference::encode_stochastic(c.checkpoint, sum[i], bits))
            << name(c) << " " << route_name(route) << " element " << i << " at " << t;
      }
    }
  }
}

// Another slot, other neighbours, another order, other threads: the same sequence has the same
// bits. Another seed has others.
TEST_P(Rounding, IsAFunctionOfTheSequence) {
  const Case c = GetParam();
  const auto in = random_inputs(c, 24, 52), other = random_inputs(c, 24, 53);
  const RingConfig ring{.buffer_len = 4};
  Pool alone(c, ring, 1), together(c, ring, 4);
  ThreadPool one(1), three(3);
  alone.clear(0);
  alone.seeds[0] = 77;
  for (const int64_t slot : {1, 2, 3}) together.clear(slot);
  together.seeds = {0, 5, 77, 78};
  for (int64_t t = 0; t < 24; ++t) {
    const auto want = decode(c, alone, Route::kOutputOnly, in, t, t + 1, 1, one);
    const auto got = run(c, together, Op::kStep, Route::kOutputOnly,
                         {{&other, t, t + 1, 1, {}},
                          {&other, t, t + 1, -1, {}},
                          {&in, t, t + 1, 2, {}},
                          {&in, t, t + 1, 3, {}}},
                         three);
    EXPECT_EQ(got[2], want);
    for (const int32_t slot : {1, 2, 3}) commit_step(together.cursors[slot], 1, Route::kOutputOnly);
  }
  EXPECT_EQ(alone.contents(0), together.contents(2)) << name(c);
  if (alone.elements() > 64) {
    EXPECT_FALSE(std::ranges::equal(alone.slot(0), together.slot(3))) << name(c);
  }
}

// A state that is written once and kept: over many seeds its mean is what was written. Rounded to
// nearest it would be off by up to half a step, always to the same side.
TEST(RoundingStatistics, IsUnbiased) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Case c{{Family::kMamba2, 1, 1, 4, 24}};
    c.checkpoint = dtype;
    c.rounding = 3;
    Case wide = c;
    wide.checkpoint = DType::kFloat32;
    wide.rounding.reset();
    const auto in = random_inputs(c, 1, 54);
    ThreadPool threads(1);
    Pool exact(wide, {}, 1);
    exact.clear(0);
    decode(wide, exact, Route::kConventional, in, 0, 1, 1, threads);
    const auto want = exact.slot_values(0);
    constexpr int kSeeds = 2000;
    std::vector<double> mean(want.size());
    for (int seed = 0; seed < kSeeds; ++seed) {
      Pool pool(c, {}, 1);
      pool.clear(0);
      pool.seeds[0] = seed;
      decode(c, pool, Route::kConventional, in, 0, 1, 1, threads);
      const auto values = pool.slot_values(0);
      for (size_t i = 0; i < mean.size(); ++i) mean[i] += values[i] / kSeeds;
    }
    for (size_t i = 0; i < mean.size(); ++i) {
      // A step of the format; the rounding of one store deviates by at most half of it, a mean of
      // 2000 by sqrt(2000) less. Five of those, 192 times: one failure in ten thousand runs.
      const double step = 2 * rounding_error(dtype) * std::abs(want[i]) + 0x1p-24;
      EXPECT_NEAR(mean[i], want[i], 5 * step / 2 / std::sqrt(double{kSeeds}));
    }
  }
}

// pitfalls 8: a recycled slot draws its own sequence's numbers, not those of its predecessor.
TEST(RoundingStatistics, StreamsOfLayersAndPositionsDiffer) {
  EXPECT_NE(reference::rounding_bits(1, 0, 0, 0, 0, 8), reference::rounding_bits(2, 0, 0, 0, 0, 8));
  EXPECT_NE(reference::rounding_bits(1, 0, 0, 0, 0, 8), reference::rounding_bits(1, 1, 0, 0, 0, 8));
  EXPECT_NE(reference::rounding_bits(1, 0, 0, 0, 0, 8), reference::rounding_bits(1, 0, 1, 0, 0, 8));
  EXPECT_NE(reference::rounding_bits(1, 0, 0, 0, 0, 8), reference::rounding_bits(1, 0, 0, 1, 0, 8));
}

}  // namespace
}  // namespace replayssm::testing
