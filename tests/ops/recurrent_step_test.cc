#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "ops/recurrent_harness.h"

namespace replayssm::testing {
namespace {

constexpr Route kRoutes[] = {Route::kConventional, Route::kStateAndOutput, Route::kOutputOnly};

class RecurrentStep : public ::testing::TestWithParam<Case> {
 protected:
  ThreadPool threads_{2};
};

INSTANTIATE_TEST_SUITE_P(Shapes, RecurrentStep, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

// Decodes the whole sequence in slot 0 by windows of `window` tokens, all accepted.
std::vector<float> decode(const Case& c, Pool& pool, Route route, const Inputs& in, int64_t tokens,
                          int64_t window, ThreadPool& threads) {
  std::vector<float> o;
  for (int64_t t = 0; t < tokens; t += window) {
    const int64_t end = std::min(tokens, t + window);
    const auto out = run(c, pool, Op::kStep, route, {{&in, t, end, 0}}, threads)[0];
    o.insert(o.end(), out.begin(), out.end());
    commit_step(pool.cursors[0], end - t, route);
  }
  return o;
}

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

TEST_P(RecurrentStep, EveryRouteMatchesTheReference) {
  const Case c = GetParam();
  const int64_t tokens = 50;
  const auto in = random_inputs(c, tokens, 1);
  const auto want = expected(c, in, tokens);
  for (const Route route : kRoutes) {
    for (const int32_t buffer_len : {1, 5, 16}) {
      for (const int64_t window : {1, 3}) {
        Pool pool(c, {.buffer_len = buffer_len, .max_window = 3}, 1);
        pool.clear(0);
        const auto o = decode(c, pool, route, in, tokens, window, threads_);
        fold(c, pool, 0, threads_);
        EXPECT_LT(relative_error(o, want.o), step_tolerance(c))
            << name(c) << " " << route_name(route) << " B=" << buffer_len << " T=" << window;
        EXPECT_LT(relative_error(pool.slot_values(0), want.state), step_tolerance(c))
            << name(c) << " " << route_name(route) << " B=" << buffer_len << " T=" << window;
      }
    }
  }
}

TEST_P(RecurrentStep, AnyFlushScheduleGivesTheConventionalState) {
  Case c = GetParam();
  c.checkpoint = DType::kFloat32;
  const int64_t tokens = 70;
  const auto in = random_inputs(c, tokens, 2);
  Pool conventional(c, {}, 1);
  conventional.clear(0);
  decode(c, conventional, Route::kConventional, in, tokens, 1, threads_);
  std::mt19937 random(3);
  for (int trial = 0; trial < 12; ++trial) {
    const RingConfig ring{.buffer_len = 1 + static_cast<int32_t>(random() % 20),
                          .max_window = 1 + static_cast<int32_t>(random() % 4)};
    Pool pool(c, ring, 1);
    pool.clear(0);
    pool.cursors[0].ring_start += random() % 1000;  // any ring start
    pool.cursors[0].ring_limit = 1 + random() % ring.buffer_len;
    const Route route = kRoutes[1 + trial % 2];
    decode(c, pool, route, in, tokens, 1 + random() % ring.max_window, threads_);
    fold(c, pool, 0, threads_);
    EXPECT_EQ(pool.checkpoint, conventional.checkpoint)
        << name(c) << " B=" << ring.buffer_len << " " << route_name(route);
  }
}

TEST_P(RecurrentStep, RejectedTokensLeaveNoTrace) {
  const Case c = GetParam();
  const int64_t tokens = 40;
  const auto in = random_inputs(c, tokens, 4), rejected = random_inputs(c, tokens, 40);
  const RingConfig ring{.buffer_len = 6, .max_window = 4};
  Pool pool(c, ring, 1), plain(c, ring, 1);
  pool.clear(0);
  plain.clear(0);
  std::mt19937 random(5);
  for (int64_t t = 0; t < tokens;) {
    const int64_t accepted = std::min<int64_t>(random() % 4, tokens - t);
    // The window: accepted tokens of the sequence, then others that are thrown away.
    Inputs mixed = in;
    const auto replace = [&](std::vector<float>& x, const std::vector<float>& y, int64_t width) {
      std::copy(y.begin() + (t + accepted) * width, y.end(), x.begin() + (t + accepted) * width);
    };
    const auto& s = c.shape;
    replace(mixed.v, rejected.v, s.heads * s.head_dim);
    replace(mixed.k, rejected.k, s.key_heads * s.state_dim);
    replace(mixed.b, rejected.b, s.heads);
    replace(mixed.g, rejected.g, s.heads);
    const int64_t end = std::min(tokens, t + 4);
    // The same flushes on both sides, so that outputs agree bit for bit too.
    plain.cursors[0] = pool.cursors[0];
    const auto got =
        run(c, pool, Op::kStep, Route::kOutputOnly, {{&mixed, t, end, 0}}, threads_)[0];
    const auto want = run(c, plain, Op::kStep, Route::kOutputOnly, {{&in, t, end, 0}}, threads_)[0];
    EXPECT_EQ(std::memcmp(got.data(), want.data(), accepted * s.heads * s.head_dim * sizeof(float)),
              0)
        << name(c);
    commit_step(pool.cursors[0], accepted, Route::kOutputOnly);
    commit_step(plain.cursors[0], accepted, Route::kOutputOnly);
    t += accepted;
  }
  fold(c, pool, 0, threads_);
  fold(c, plain, 0, threads_);
  EXPECT_EQ(pool.checkpoint, plain.checkpoint) << name(c);
}

TEST_P(RecurrentStep, NeighboursThreadsAndOrderChangeNoBit) {
  const Case c = GetParam();
  const int64_t tokens = 24;
  std::vector<Inputs> in;
  for (uint32_t s = 0; s < 4; ++s) in.push_back(random_inputs(c, tokens, 10 + s));
  const RingConfig ring{.buffer_len = 5, .max_window = 2};
  for (const Route route : kRoutes) {
    Pool alone(c, ring, 4), together(c, ring, 7);
    for (const int64_t slot : {0, 1, 2, 3}) alone.clear(slot);
    const int32_t slots[] = {5, 2, 6, 0};
    for (const int32_t slot : slots) together.clear(slot);
    for (int64_t t = 0; t < tokens; t += 2) {
      std::vector<Window> rows;
      for (const int s : {2, 0, 3, 1}) rows.push_back({&in[s], t, t + 2, slots[s]});
      rows.insert(rows.begin() + 1, {&in[0], t, t + 1, -1});  // padding
      rows.push_back({&in[1], t, t, 3});                      // an idle, poisoned slot: T = 0
      ThreadPool one(1), three(3);
      const auto batch = run(c, together, Op::kStep, route, rows, t % 4 == 0 ? three : threads_);
      EXPECT_EQ(std::count(batch[1].begin(), batch[1].end(), 0.0f),
                static_cast<int64_t>(batch[1].size()));
      const int where[] = {2, 4, 0, 3};
      for (int s = 0; s < 4; ++s) {
        const auto single = run(c, alone, Op::kStep, route, {{&in[s], t, t + 2, s}}, one)[0];
        EXPECT_EQ(single, batch[where[s]]) << name(c) << " " << route_name(route);
        commit_step(alone.cursors[s], 2, route);
        commit_step(together.cursors[slots[s]], 2, route);
      }
    }
    for (int s = 0; s < 4; ++s)
      EXPECT_TRUE(std::ranges::equal(alone.slot(s), together.slot(slots[s]))) << name(c);
    for (const int64_t unused : {1, 3, 4})
      EXPECT_TRUE(std::ranges::all_of(together.slot(unused), [](uint8_t b) { return b == 0xff; }));
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

TEST(RecurrentStepExtremes, StrongAndZeroDecayHugeAndZeroKeys) {
  for (const Family family : {Family::kMamba2, Family::kGatedDelta}) {
    const Case c{{family, 2, 1, 8, 64}};
    auto in = random_inputs(c, 40, 7);
    for (size_t i = 0; i < in.g.size(); ++i)
      in.g[i] = i % 3 == 0 ? -69.0f : i % 3 == 1 ? 0.0f : -1e4f;
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
      const auto o = decode(c, pool, route, in, 40, 1, threads);
      EXPECT_LT(relative_error(o, want.o), fp32_tolerance(c)) << route_name(route);
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
