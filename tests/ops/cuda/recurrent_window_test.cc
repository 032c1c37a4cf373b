// Windows of several tokens on the device: ragged chains, rejected tokens, trees.
#include <gtest/gtest.h>

#include "ops/cuda/harness.h"

namespace replayssm::testing {
namespace {

class CudaWindow : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Shapes, CudaWindow, ::testing::ValuesIn(step_cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

constexpr Route kReplayRoutes[] = {Route::kStateAndOutput, Route::kOutputOnly};

TEST_P(CudaWindow, EveryRouteMatchesTheReference) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const int64_t tokens = 40;
  const auto in = random_inputs(c, tokens, 1);
  const auto want = expected(c, in, tokens);
  for (const Route route : kRoutes) {
    for (const int32_t window : {2, 5, 8, 16}) {
      SCOPED_TRACE(name(c) + " " + route_name(route) + " T=" + std::to_string(window));
      Pool pool(c, {.buffer_len = 16, .max_window = window}, 1);
      pool.clear(0);
      const auto o = decode(c, pool, route, in, 0, tokens, window);
      fold(c, pool, 0);
      EXPECT_LT(relative_error(o, want.o), output_tolerance(c) + copy_tolerance(c));
      EXPECT_LT(relative_error(pool.slot_values(0), want.state), state_tolerance(c));
      if (c.checkpoint == DType::kFloat32 && c.output == DType::kFloat32 && !c.read_copy) {
        EXPECT_LT(relative_error(o, want.o), 1e-6);
      }
    }
  }
}

// Rings of more rows than a warp has lanes, whose first fold is a short one.
TEST_P(CudaWindow, LongRingsMatchTheReference) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const int64_t tokens = 60;
  const auto in = random_inputs(c, tokens, 6);
  const auto want = expected(c, in, tokens);
  for (const Route route : kReplayRoutes) {
    SCOPED_TRACE(name(c) + " " + route_name(route));
    Pool pool(c, {.buffer_len = 40, .max_window = 3}, 1);
    pool.clear(0);
    pool.cursors[0].ring_limit = 9;
    const auto o = decode(c, pool, route, in, 0, tokens, 3);
    fold(c, pool, 0);
    EXPECT_LT(relative_error(o, want.o), output_tolerance(c) + copy_tolerance(c));
    EXPECT_LT(relative_error(pool.slot_values(0), want.state), state_tolerance(c));
  }
}

TEST_P(CudaWindow, AnyFlushScheduleGivesTheConventionalState) {
  REQUIRE_DEVICE();
  Case c = GetParam();
  c.checkpoint = DType::kFloat32;
  const int64_t tokens = 50;
  const auto in = random_inputs(c, tokens, 2);
  const auto want = conventional_checkpoint(c, in, tokens);
  std::mt19937 random(3);
  for (int trial = 0; trial < 6; ++trial) {
    const RingConfig ring{.buffer_len = 1 + static_cast<int32_t>(random() % 20),
                          .max_window = 2 + static_cast<int32_t>(random() % 8)};
    Pool pool(c, ring, 1);
    pool.clear(0);
    pool.cursors[0].ring_start += random() % 1000;
    pool.cursors[0].ring_limit = 1 + random() % ring.buffer_len;
    const Route route = kReplayRoutes[trial % 2];
    for (int64_t t = 0; t < tokens;) {
      const int64_t end = std::min<int64_t>(tokens, t + 1 + random() % ring.max_window);
      decode(c, pool, route, in, t, end, end - t);
      pool.poison_ring(0);
      t = end;
    }
    fold(c, pool, 0);
    EXPECT_EQ(pool.checkpoint.bytes, want)
        << name(c) << " B=" << ring.buffer_len << " " << route_name(route);
  }
}

TEST_P(CudaWindow, RejectedTokensLeaveNoTrace) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const auto& s = c.shape;
  const int64_t tokens = 24;
  const auto in = random_inputs(c, tokens, 4), rejected = random_inputs(c, tokens, 40);
  for (const Route route : kReplayRoutes) {
    const RingConfig ring{.buffer_len = 6, .max_window = 4};
    Pool pool(c, ring, 1), plain(c, ring, 1);
    pool.clear(0);
    plain.clear(0);
    std::mt19937 random(5);
    for (int64_t t = 0; t < tokens;) {
      const int64_t accepted = std::min<int64_t>(random() % 5, tokens - t);
      const int64_t end = std::min(tokens, t + 4);
      const Inputs mixed = spliced(c, in, rejected, t + accepted);
      plain.cursors[0] = pool.cursors[0];  // the same flushes: outputs agree bit for bit
      auto got = run(c, pool, route, {{&mixed, t, end, 0, {}}})[0];
      auto want = run(c, plain, route, {{&in, t, end, 0, {}}})[0];
      got.resize(accepted * s.heads * s.head_dim);
      want.resize(got.size());
      EXPECT_EQ(got, want) << name(c);
      commit_step(pool.cursors[0], accepted, route);
      commit_step(plain.cursors[0], accepted, route);
      pool.poison_ring(0);
      t += accepted;
    }
    fold(c, pool, 0);
    fold(c, plain, 0);
    EXPECT_EQ(pool.checkpoint.bytes, plain.checkpoint.bytes) << name(c);
  }
}

TEST_P(CudaWindow, RaggedNeighboursOrderAndLaunchChangeNoBit) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const auto in = random_inputs(c, 40, 10), other = random_inputs(c, 40, 11);
  const RingConfig ring{.buffer_len = 7, .max_window = 5};
  for (const Route route : kRoutes) {
    Pool alone(c, ring, 2), together(c, ring, 5);
    for (const int slot : {0, 1}) alone.clear(slot);
    for (const int slot : {1, 3}) together.clear(slot);
    std::mt19937 random(12);
    for (int64_t t = 0, u = 0; t < 30 && u < 30;) {
      const int64_t tokens = 1 + random() % 5, others = 1 + random() % 5;
      // As is chosen, or cut otherwise: outputs of steps that run ahead have other bits.
      using Cut = std::optional<cuda::LaunchConfig>;
      const Cut wide = t % 2 ? cuda::LaunchConfig{.warps = 2} : Cut{};
      const Cut cut = t % 2 ? cuda::LaunchConfig{.warps = 1} : Cut{};
      const auto batch = run(c, together, route,
                             {{&other, u, u + others, 1, {}},
                              {&other, 0, 3, -1, {}},
                              {&in, t, t + tokens, 3, {}},
                              {&in, 0, 0, 2, {}}},
                             wide);
      EXPECT_EQ(run(c, alone, route, {{&in, t, t + tokens, 0, {}}}, cut)[0], batch[2]) << name(c);
      EXPECT_EQ(run(c, alone, route, {{&other, u, u + others, 1, {}}}, cut)[0], batch[0])
          << name(c);
      EXPECT_EQ(std::ranges::count(batch[1], 0.0f), std::ssize(batch[1]));
      t += tokens, u += others;
      commit_step(alone.cursors[0], tokens, route);
      commit_step(alone.cursors[1], others, route);
      commit_step(together.cursors[3], tokens, route);
      commit_step(together.cursors[1], others, route);
    }
    EXPECT_EQ(alone.contents(0), together.contents(3)) << name(c);
    EXPECT_EQ(alone.contents(1), together.contents(1)) << name(c);
    for (const int unused : {0, 2, 4}) EXPECT_TRUE(together.untouched(unused));
  }
}

TEST_P(CudaWindow, AnyRingStartGivesTheSameOutputs) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  if (c.rounding) return;  // its random bits depend on the position
  const auto in = random_inputs(c, 21, 4);
  for (const Route route : kReplayRoutes) {
    std::vector<float> first;
    for (const int64_t start : {int64_t{0}, int64_t{5}, int64_t{1} << 40}) {
      Pool pool(c, {.buffer_len = 6, .max_window = 3}, 1);
      pool.clear(0);
      pool.cursors[0].ring_start += start;
      const auto o = decode(c, pool, route, in, 0, 21, 3);
      if (first.empty()) first = o;
      EXPECT_EQ(o, first) << name(c) << " " << route_name(route) << " start " << start;
    }
  }
}

TEST_P(CudaWindow, TheSameLaunchFiveTimes) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const auto in = random_inputs(c, 15, 8);
  Pool before(c, {.buffer_len = 10, .max_window = 5}, 1);
  before.clear(0);
  decode(c, before, Route::kOutputOnly, in, 0, 10, 5);
  Pool first = before;
  const auto o = run(c, first, Route::kOutputOnly, {{&in, 10, 15, 0, {}}});
  for (int i = 0; i < 4; ++i) {
    Pool again = before;
    EXPECT_EQ(run(c, again, Route::kOutputOnly, {{&in, 10, 15, 0, {}}}), o) << name(c);
    EXPECT_EQ(again.contents(0), first.contents(0)) << name(c);
  }
}

constexpr int64_t kNodes = 9;

TEST_P(CudaWindow, ATreeEqualsEachOfItsPathsAlone) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const int64_t width = c.shape.heads * c.shape.head_dim;
  std::mt19937 random(31);
  for (const Route route : kReplayRoutes) {
    for (const int64_t history : {0, 3, 7}) {  // the last one folds
      SCOPED_TRACE(name(c) + " " + route_name(route) + " history " + std::to_string(history));
      const auto in = random_inputs(c, history + kNodes, random());
      Pool pool(c, {.buffer_len = 12, .max_window = kNodes}, 1);
      pool.clear(0);
      decode(c, pool, route, in, 0, history, 1);
      Pool before = pool;
      Oracle oracle(c);
      for (int64_t t = 0; t < history; ++t) oracle.commit(in, t);
      const auto parent = random_tree(random, kNodes);
      const auto o = run(c, pool, route, {{&in, history, history + kNodes, 0, parent}})[0];
      EXPECT_LT(relative_error(o, oracle.outputs(in, history, history + kNodes, parent)),
                output_tolerance(c) + copy_tolerance(c));
      for (int64_t i = 0; i < kNodes; ++i) {
        const auto path = reference::path_to(parent, i);
        const auto alone = gathered(c, in, history, path);
        Pool single = before;
        // The same phase, so that both fold or neither does.
        if (pool.cursors[0].fold_count > 0) single.cursors[0].ring_limit = 0;
        const auto want = run(c, single, route, {{&alone, 0, std::ssize(path), 0, {}}})[0];
        const std::vector<float> last(want.end() - width, want.end());
        const std::vector<float> node(o.begin() + i * width, o.begin() + (i + 1) * width);
        // The tensor cores add rows in an order that depends on where they lie.
        if (route == Route::kOutputOnly && !cuda::are_operands(c.activation)) {
          EXPECT_EQ(node, last) << "token " << i;
        } else {  // a chain is folded in registers, a tree is walked
          EXPECT_LT(relative_error(node, last), 2 * output_tolerance(c)) << "token " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
