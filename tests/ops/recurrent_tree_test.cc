// Tree windows: a token sees the committed tokens and its ancestors, nothing else.
#include <gtest/gtest.h>

#include "ops/recurrent_harness.h"
#include "ops/recurrent_oracle.h"

namespace replayssm::testing {
namespace {

class RecurrentTree : public ::testing::TestWithParam<Case> {
 protected:
  ThreadPool threads_{2};
};

INSTANTIATE_TEST_SUITE_P(Shapes, RecurrentTree, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

constexpr int64_t kNodes = 9;
constexpr Route kTreeRoutes[] = {Route::kStateAndOutput, Route::kOutputOnly};

TEST_P(RecurrentTree, EqualsEachOfItsPathsAlone) {
  const Case c = GetParam();
  const int64_t width = c.shape.heads * c.shape.head_dim;
  std::mt19937 random(31);
  for (const Route route : kTreeRoutes) {
    for (const int64_t history : {0, 3, 7}) {  // the last one folds
      SCOPED_TRACE(name(c) + " " + route_name(route) + " history " + std::to_string(history));
      const auto in = random_inputs(c, history + kNodes, random());
      const RingConfig ring{.buffer_len = 12, .max_window = kNodes};
      Pool pool(c, ring, 1);
      pool.clear(0);
      decode(c, pool, route, in, 0, history, 1, threads_);
      Pool before = pool;
      Oracle oracle(c);
      for (int64_t t = 0; t < history; ++t) oracle.commit(in, t);

      const auto parent = random_tree(random, kNodes);
      const auto o = run(c, pool, Op::kStep, route, {{&in, history, history + kNodes, 0, parent}},
                         threads_)[0];
      EXPECT_LT(relative_error(o, oracle.outputs(in, history, history + kNodes, parent)),
                output_tolerance(c));
      for (int64_t i = 0; i < kNodes; ++i) {
        const auto path = reference::path_to(parent, i);
        const auto alone = gathered(c, in, history, path);
        Pool single = before;
        // The same phase, so that both fold or neither does.
        if (pool.cursors[0].fold_count > 0) single.cursors[0].ring_limit = 0;
        const auto want =
            run(c, single, Op::kStep, route, {{&alone, 0, std::ssize(path), 0, {}}}, threads_)[0];
        const std::vector<float> last(want.end() - width, want.end());
        const std::vector<float> node(o.begin() + i * width, o.begin() + (i + 1) * width);
        if (route == Route::kOutputOnly) {
          EXPECT_EQ(node, last) << "token " << i;
        } else {  // a chain is folded in registers, a tree is walked
          EXPECT_LT(relative_error(node, last), 2 * output_tolerance(c)) << "token " << i;
        }
      }
    }
  }
}

TEST_P(RecurrentTree, ChainGivenAsParentsIsThatChain) {
  const Case c = GetParam();
  const auto in = random_inputs(c, 20, 33);
  const RingConfig ring{.buffer_len = 6, .max_window = 5};
  Pool plain(c, ring, 1), tree(c, ring, 1);
  plain.clear(0);
  tree.clear(0);
  for (int64_t t = 0; t < 20; t += 5) {
    const auto want =
        run(c, plain, Op::kStep, Route::kOutputOnly, {{&in, t, t + 5, 0, {}}}, threads_)[0];
    const auto got = run(c, tree, Op::kStep, Route::kOutputOnly,
                         {{&in, t, t + 5, 0, reference::chain(5)}}, threads_)[0];
    EXPECT_EQ(got, want) << name(c);
    for (Pool* pool : {&plain, &tree}) commit_step(pool->cursors[0], 5, Route::kOutputOnly);
    EXPECT_EQ(tree.contents(0), plain.contents(0)) << name(c);
  }
}

// Trees, chains, padding and idle rows in one batch change no bit of each other.
TEST_P(RecurrentTree, NeighboursChangeNoBit) {
  const Case c = GetParam();
  const auto in = random_inputs(c, kNodes, 34), other = random_inputs(c, 4, 35);
  std::mt19937 random(36);
  const auto parent = random_tree(random, kNodes);
  const RingConfig ring{.buffer_len = 4, .max_window = kNodes};
  for (const Route route : kTreeRoutes) {
    Pool alone(c, ring, 1), together(c, ring, 4);
    alone.clear(0);
    together.clear(1);
    together.clear(3);
    const auto want = run(c, alone, Op::kStep, route, {{&in, 0, kNodes, 0, parent}}, threads_)[0];
    const auto got = run(c, together, Op::kStep, route,
                         {{&other, 0, 4, 1, {}},
                          {&other, 0, 2, -1, {}},
                          {&in, 0, kNodes, 3, parent},
                          {&in, 0, 0, 2, {}}},
                         threads_);
    EXPECT_EQ(got[2], want) << name(c);
    EXPECT_EQ(std::ranges::count(got[1], 0.0f), std::ssize(got[1]));
    EXPECT_EQ(alone.contents(0), together.contents(3));
    EXPECT_TRUE(together.untouched(0));
    EXPECT_TRUE(together.untouched(2));
  }
}

// A state that is stored at every token has no place for branches.
TEST(RecurrentTreeContract, ConventionalRefusesTrees) {
  const Case c{{Family::kMamba2, 1, 1, 4, 4}};
  const auto in = random_inputs(c, 3, 37);
  Pool pool(c, {.max_window = 3}, 1);
  pool.clear(0);
  ThreadPool threads(1);
  EXPECT_THROW(run(c, pool, Op::kStep, Route::kConventional, {{&in, 0, 3, 0, {-1, 0, 0}}}, threads),
               Error);
}

}  // namespace
}  // namespace replayssm::testing
