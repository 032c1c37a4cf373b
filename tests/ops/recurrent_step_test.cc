// Decode steps against the definition: values, extremes, refusals.
#include <gtest/gtest.h>

#include "ops/recurrent_harness.h"
#include "ops/recurrent_oracle.h"

namespace replayssm::testing {
namespace {

class RecurrentStep : public ::testing::TestWithParam<Case> {
 protected:
  ThreadPool threads_{2};
};

INSTANTIATE_TEST_SUITE_P(Shapes, RecurrentStep, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

// Outputs and states (pitfalls 2: a state that drifts behind correct outputs; 31: tolerances that
// let a bug through).
TEST_P(RecurrentStep, EveryRouteMatchesTheReference) {
  const Case c = GetParam();
  const int64_t tokens = 50;
  const auto in = random_inputs(c, tokens, 1);
  const auto want = expected(c, in, tokens);
  for (const Route route : kRoutes) {
    for (const int32_t buffer_len : {1, 5, 16}) {
      for (const int64_t window : {1, 3}) {
        SCOPED_TRACE(name(c) + " " + route_name(route) + " B=" + std::to_string(buffer_len) +
                     " T=" + std::to_string(window));
        Pool pool(c, {.buffer_len = buffer_len, .max_window = 3}, 1);
        pool.clear(0);
        const auto o = decode(c, pool, route, in, 0, tokens, window, threads_);
        fold(c, pool, 0, threads_);
        EXPECT_LT(relative_error(o, want.o), output_tolerance(c));
        EXPECT_LT(relative_error(pool.slot_values(0), want.state), state_tolerance(c));
      }
    }
  }
}

// Windows longer than the history that a ring may hold, so that every row of it is written or
// folded in one step (pitfalls 7: rows overwritten before they are read; 12: history tied to the
// window).
TEST_P(RecurrentStep, WindowsMayBeLongerThanTheBuffer) {
  const Case c = GetParam();
  const int64_t tokens = 36;
  const auto in = random_inputs(c, tokens, 3);
  const auto want = expected(c, in, tokens);
  for (const Route route : kRoutes) {
    Pool pool(c, {.buffer_len = 2, .max_window = 9}, 1);
    pool.clear(0);
    EXPECT_LT(relative_error(decode(c, pool, route, in, 0, tokens, 9, threads_), want.o),
              output_tolerance(c))
        << name(c) << " " << route_name(route);
  }
}

TEST(RecurrentStepContract, RefusesWhatItCannotDo) {
  ThreadPool threads(1);
  RecurrentStepParams p;
  const auto refuses = [&](RecurrentShape shape) {
    p.shape = shape;
    EXPECT_THROW(cpu::recurrent_step(p, nullptr, threads), Error);
  };
  refuses({Family::kMamba2, 5, 2, 8, 8});
  refuses({Family::kMamba2, 4, 2, 0, 8});
  refuses({Family::kMamba2, 4, 2, 8, kMaxStateDim + 1});
  refuses({Family::kMamba2, 4, 2, 8, 8});  // no memory
}

TEST(RecurrentStepContract, ABatchOfNobodyIsLegal) {
  const Case c{{Family::kGatedDelta, 2, 1, 8, 8}};
  Pool pool(c, {}, 1);
  ThreadPool threads(1);
  for (const Op op : {Op::kStep, Op::kPrefill}) {
    EXPECT_TRUE(run(c, pool, op, Route::kOutputOnly, {}, threads).empty());
    EXPECT_TRUE(pool.untouched(0));
  }
}

constexpr Family kFamilies[] = {Family::kMamba2, Family::kGatedDelta, Family::kKimiDelta};

// Decays from 1 to exp(-1e4) side by side, keys of zeros and of 1e8 (pitfalls 4: products of
// exponentials that are inf * 0; 8: replay data out of range).
TEST(RecurrentStepExtremes, StrongAndZeroDecayHugeAndZeroKeys) {
  for (const Family family : kFamilies) {
    Case c{{family, 2, 1, 8, 64}};
    auto in = random_inputs(c, 40, 7);
    for (size_t i = 0; i < in.g.size(); ++i)
      in.g[i] = i % 3 == 0 ? -69.0f : i % 3 == 1 ? 0.0f : -1e4f;
    for (size_t i = 0; i < in.gate.size(); ++i)  // softplus: 0, and decays down to exp(-1e4)
      in.gate[i] = i % 3 == 0 ? 300.0f : i % 3 == 1 ? -200.0f : 1e5f;
    for (int64_t i = 0; i < 64; ++i) {
      in.k[5 * 64 + i] = 0;
      in.k[6 * 64 + i] *= 1e8f;
      in.q[9 * 64 + i] = 0;
    }
    const auto want = expected(c, in, 40);
    ThreadPool threads(1);
    for (const Route route : kRoutes) {
      Pool pool(c, {.buffer_len = 16}, 1);
      pool.clear(0);
      const auto o = decode(c, pool, route, in, 0, 40, 1, threads);
      EXPECT_LT(relative_error(o, want.o), fp32_tolerance(c))
          << family_name(family) << " " << route_name(route);
    }
  }
}

// exp(g) from 1 down to 1e-30 in every column and head, for each decay alone.
TEST(RecurrentStepExtremes, EveryDecay) {
  for (const Family family : kFamilies) {
    for (const double decay : {1.0, 0.999999, 0.5, 1e-6, 1e-15, 1e-30, 1e-45, 0.0}) {
      Case c{{family, 2, 2, 9, 48}};
      auto in = random_inputs(c, 30, 8);
      const auto g = static_cast<float>(std::max(std::log(decay), -1e30));
      for (float& x : in.g) x = g;
      // softplus(x) = x from 20 on, and of a very negative x it is exp(x).
      for (size_t i = 0; i < in.gate.size(); ++i)
        in.gate[i] = decay == 1.0 ? -150.0f : static_cast<float>(std::max(-10 * double{g}, -150.0));
      const auto want = expected(c, in, 30);
      ThreadPool threads(1);
      for (const Route route : kRoutes) {
        Pool pool(c, {.buffer_len = 7}, 1);
        pool.clear(0);
        const auto o = decode(c, pool, route, in, 0, 30, 1, threads);
        fold(c, pool, 0, threads);
        // Nothing is forgotten where the decay is 1: thirty tokens' errors add.
        EXPECT_LT(relative_error(o, want.o), 4 * fp32_tolerance(c))
            << family_name(family) << " " << route_name(route) << " " << decay;
        EXPECT_LT(relative_error(pool.slot_values(0), want.state), 4 * fp32_tolerance(c))
            << family_name(family) << " " << route_name(route) << " " << decay;
      }
    }
  }
}

// Near-collinear keys written with full strength and hardly any decay, in bf16: corrected values
// cancel there, and a fold of rounded corrections drifts (pitfalls 1: the open-loop fold).
TEST(RecurrentStepExtremes, CollinearKeysDoNotDrift) {
  for (const Family family : {Family::kGatedDelta, Family::kKimiDelta}) {
    Case c{{family, 1, 1, 16, 32}, DType::kBFloat16};
    const int64_t tokens = 600;
    auto in = random_inputs(c, tokens, 9);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < 32; ++i)
        in.k[t * 32 + i] = rounded<bf16>(in.k[i] + 0.02f * in.k[t * 32 + i]);
      in.b[t] = 0.999f;
      in.g[t] = -1e-4f;
    }
    for (float& gate : in.gate) gate = -8;
    const auto want = expected(c, in, tokens);
    ThreadPool threads(1);
    for (const Route route : kRoutes) {
      Pool pool(c, {.buffer_len = 16, .max_window = 4}, 1);
      pool.clear(0);
      const auto o = decode(c, pool, route, in, 0, tokens, 4, threads);
      // The state is held by thousands of tokens' writes of which each forgets the last: errors of
      // fp32 alone, some hundred times those of well-separated keys.
      EXPECT_LT(relative_error(o, want.o), 1e-4) << family_name(family) << route_name(route);
    }
  }
}

// b is used as it came (pitfalls 3: a sigmoid rounded to bf16 and back).
TEST(RecurrentStepContract, WriteStrengthIsNeverRounded) {
  for (const Family family : kFamilies) {
    const Case c{{family, 1, 1, 1, 1}, DType::kBFloat16};
    Inputs in{.v = {1}, .k = {1}, .q = {1}, .b = {0.6225f}, .g = {0}, .gate = {-150}, .z = {}};
    ThreadPool threads(1);
    for (const Route route : kRoutes) {
      Pool pool(c, {}, 1);
      pool.clear(0);
      EXPECT_NEAR(decode(c, pool, route, in, 0, 1, 1, threads)[0], 0.6225f, 2e-6f);
      if (route != Route::kConventional) {
        float b;
        std::memcpy(&b, pool.ring_b.slot(0).data() + (pool.cursors[0].ring_start % 17) * 4, 4);
        EXPECT_EQ(b, 0.6225f);
      }
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
