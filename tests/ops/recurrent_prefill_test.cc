#include <gtest/gtest.h>

#include "ops/recurrent_harness.h"
#include "ops/recurrent_oracle.h"

namespace replayssm::testing {
namespace {

class RecurrentPrefill : public ::testing::TestWithParam<Case> {
 protected:
  ThreadPool threads_{2};
};

INSTANTIATE_TEST_SUITE_P(Shapes, RecurrentPrefill, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

// Chunk products and the triangular solve sum over up to a chunk of tokens beside state_dim.
double state_tolerance_of(const Case& c) { return 4 * state_tolerance(c); }
double output_tolerance_of(const Case& c) { return 4 * output_tolerance(c); }

TEST_P(RecurrentPrefill, MatchesTheReferenceAtAnyLength) {
  const Case c = GetParam();
  for (const int64_t tokens : {1, 2, 15, 63, 64, 65, 130}) {
    const auto in = random_inputs(c, tokens, 20);
    const auto want = expected(c, in, tokens);
    Pool pool(c, {}, 2);
    pool.clear(1);
    const auto o =
        run(c, pool, Op::kPrefill, Route::kOutputOnly, {{&in, 0, tokens, 1, {}}}, threads_)[0];
    EXPECT_LT(relative_error(o, want.o), output_tolerance_of(c)) << name(c) << " n=" << tokens;
    EXPECT_LT(relative_error(pool.slot_values(1), want.state), state_tolerance_of(c))
        << name(c) << " n=" << tokens;
  }
}

TEST_P(RecurrentPrefill, ContinuesWhereStepsAndPrefillsLeftOff) {
  const Case c = GetParam();
  const int64_t tokens = 150;
  const auto in = random_inputs(c, tokens, 21);
  const auto want = expected(c, in, tokens);
  Pool pool(c, {.buffer_len = 4}, 1);
  pool.clear(0);
  std::vector<float> o;
  const auto take = [&](Op op, int64_t begin, int64_t end) {
    const auto part = run(c, pool, op, Route::kOutputOnly, {{&in, begin, end, 0, {}}}, threads_)[0];
    o.insert(o.end(), part.begin(), part.end());
    if (op == Op::kStep) {
      commit_step(pool.cursors[0], end - begin, Route::kOutputOnly);
    } else {
      commit_prefill(pool.cursors[0], end - begin, pool.ring());
    }
  };
  take(Op::kPrefill, 0, 37);
  take(Op::kPrefill, 37, 120);
  for (int64_t t = 120; t < 131; ++t) take(Op::kStep, t, t + 1);
  fold(c, pool, 0, threads_);
  take(Op::kPrefill, 131, 150);
  EXPECT_LT(relative_error(o, want.o), output_tolerance_of(c)) << name(c);
  EXPECT_LT(relative_error(pool.slot_values(0), want.state), state_tolerance_of(c)) << name(c);
}

TEST_P(RecurrentPrefill, NeighboursAndThreadsChangeNoBit) {
  const Case c = GetParam();
  const auto a = random_inputs(c, 70, 22), b = random_inputs(c, 33, 23);
  Pool alone(c, {}, 1), together(c, {}, 4);
  alone.clear(0);
  together.clear(2);
  together.clear(3);
  ThreadPool one(1), three(3);
  const auto single = run(c, alone, Op::kPrefill, Route::kOutputOnly, {{&a, 0, 70, 0, {}}}, one)[0];
  const auto batch =
      run(c, together, Op::kPrefill, Route::kOutputOnly,
          {{&b, 0, 33, 2, {}}, {&a, 0, 5, -1, {}}, {&a, 0, 70, 3, {}}, {&b, 0, 0, 1, {}}}, three);
  EXPECT_EQ(single, batch[2]) << name(c);
  EXPECT_TRUE(std::ranges::equal(alone.slot(0), together.slot(3)));
  EXPECT_EQ(std::ranges::count(batch[1], 0.0f), static_cast<int64_t>(batch[1].size()));
  EXPECT_TRUE(std::ranges::all_of(together.slot(1), [](uint8_t byte) { return byte == 0xff; }));
}

TEST(RecurrentPrefillExtremes, StrongDecayStaysFiniteAndRight) {
  for (const Family family : {Family::kMamba2, Family::kGatedDelta, Family::kKimiDelta}) {
    const Case c{{family, 2, 1, 8, 64}};
    auto in = random_inputs(c, 130, 24);
    for (size_t i = 0; i < in.g.size(); ++i) in.g[i] = i % 5 == 0 ? -1e4f : i % 5 == 1 ? 0 : -1.0f;
    for (size_t i = 0; i < in.gate.size(); ++i)
      in.gate[i] = i % 5 == 0 ? 1e5f : i % 5 == 1 ? -150.0f : 5.0f;
    const auto want = expected(c, in, 130);
    ThreadPool threads(1);
    Pool pool(c, {}, 1);
    pool.clear(0);
    const auto o =
        run(c, pool, Op::kPrefill, Route::kOutputOnly, {{&in, 0, 130, 0, {}}}, threads)[0];
    EXPECT_LT(relative_error(o, want.o), output_tolerance_of(c));
  }
}

}  // namespace
}  // namespace replayssm::testing
