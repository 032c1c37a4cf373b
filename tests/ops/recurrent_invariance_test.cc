// What must not change the bits of a state, and mostly not those of an output: flush schedules,
// ring starts, rejected tokens, folds, neighbours, threads, repeats.
#include <gtest/gtest.h>

#include <cstring>
#include <tuple>

#include "ops/recurrent_harness.h"
#include "ops/recurrent_oracle.h"

namespace replayssm::testing {
namespace {

class RecurrentInvariance : public ::testing::TestWithParam<Case> {
 protected:
  ThreadPool threads_{2};
};

INSTANTIATE_TEST_SUITE_P(Shapes, RecurrentInvariance, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

TEST_P(RecurrentInvariance, AnyFlushScheduleGivesTheConventionalState) {
  Case c = GetParam();
  c.checkpoint = DType::kFloat32;
  const int64_t tokens = 50;
  const auto in = random_inputs(c, tokens, 2);
  Pool conventional(c, {}, 1);
  conventional.clear(0);
  decode(c, conventional, Route::kConventional, in, 0, tokens, 1, threads_);
  std::mt19937 random(3);
  for (int trial = 0; trial < 8; ++trial) {
    const RingConfig ring{.buffer_len = 1 + static_cast<int32_t>(random() % 20),
                          .max_window = 1 + static_cast<int32_t>(random() % 4)};
    Pool pool(c, ring, 1);
    pool.clear(0);
    pool.cursors[0].ring_start += random() % 1000;  // any ring start
    pool.cursors[0].ring_limit = 1 + random() % ring.buffer_len;
    const Route route = kRoutes[1 + trial % 2];
    for (int64_t t = 0; t < tokens;) {
      const int64_t end = std::min<int64_t>(tokens, t + 1 + random() % ring.max_window);
      decode(c, pool, route, in, t, end, end - t, threads_);
      if (random() % 9 == 0) fold(c, pool, 0, threads_);
      pool.poison_ring(0);
      t = end;
    }
    fold(c, pool, 0, threads_);
    EXPECT_EQ(pool.checkpoint.bytes, conventional.checkpoint.bytes)
        << name(c) << " B=" << ring.buffer_len << " " << route_name(route);
  }
}

// Where in memory a ring begins is nobody's business, and counters may be large.
TEST_P(RecurrentInvariance, AnyRingStartGivesTheSameOutputs) {
  const Case c = GetParam();
  const auto in = random_inputs(c, 40, 4);
  const RingConfig ring{.buffer_len = 6, .max_window = 3};
  for (const Route route : {Route::kStateAndOutput, Route::kOutputOnly}) {
    std::vector<float> first;
    for (const int64_t start : {int64_t{0}, int64_t{5}, int64_t{8}, int64_t{1} << 40}) {
      Pool pool(c, ring, 1);
      pool.clear(0);
      pool.cursors[0].ring_start += start;
      const auto o = decode(c, pool, route, in, 0, 40, 3, threads_);
      if (first.empty()) first = o;
      EXPECT_EQ(o, first) << name(c) << " " << route_name(route) << " start " << start;
    }
  }
}

// Windows of 4 of which 0 to 4 tokens are accepted, against a slot that never saw the others
// (pitfalls 3.2: nothing accepted on a step that folds).
TEST_P(RecurrentInvariance, RejectedTokensLeaveNoTrace) {
  const Case c = GetParam();
  const auto& s = c.shape;
  const int64_t tokens = 40;
  const auto in = random_inputs(c, tokens, 4), rejected = random_inputs(c, tokens, 40);
  for (const Route route : {Route::kStateAndOutput, Route::kOutputOnly}) {
    const RingConfig ring{.buffer_len = 6, .max_window = 4};
    Pool pool(c, ring, 1), plain(c, ring, 1);
    pool.clear(0);
    plain.clear(0);
    std::mt19937 random(5);
    for (int64_t t = 0; t < tokens;) {
      const int64_t accepted = std::min<int64_t>(random() % 5, tokens - t);
      const int64_t end = std::min(tokens, t + 4);
      // The window: accepted tokens of the sequence, then others that are thrown away.
      const Inputs mixed = spliced(c, in, rejected, t + accepted);
      // The same flushes on both sides, so that outputs agree bit for bit too.
      plain.cursors[0] = pool.cursors[0];
      const auto got = run(c, pool, Op::kStep, route, {{&mixed, t, end, 0, {}}}, threads_)[0];
      const auto want = run(c, plain, Op::kStep, route, {{&in, t, end, 0, {}}}, threads_)[0];
      EXPECT_EQ(
          std::memcmp(got.data(), want.data(), accepted * s.heads * s.head_dim * sizeof(float)), 0)
          << name(c);
      commit_step(pool.cursors[0], accepted, route);
      commit_step(plain.cursors[0], accepted, route);
      pool.poison_ring(0);
      t += accepted;
    }
    fold(c, pool, 0, threads_);
    fold(c, plain, 0, threads_);
    EXPECT_EQ(pool.checkpoint.bytes, plain.checkpoint.bytes) << name(c);
  }
}

// Padding between the rows, poisoned slots, slots beyond the batch (pitfalls 6, 13, 24: shared
// dummy slots, leaking masked rows, buffers indexed by slot).
TEST_P(RecurrentInvariance, NeighboursThreadsAndOrderChangeNoBit) {
  const Case c = GetParam();
  const int64_t tokens = 24;
  std::vector<Inputs> in;
  for (uint32_t s = 0; s < 4; ++s) in.push_back(random_inputs(c, tokens, 10 + s));
  const RingConfig ring{.buffer_len = 5, .max_window = 2};
  ThreadPool one(1), three(3);
  for (const Route route : kRoutes) {
    Pool alone(c, ring, 4), together(c, ring, 7);
    for (const int64_t slot : {0, 1, 2, 3}) alone.clear(slot);
    const int32_t slots[] = {5, 2, 6, 0};
    for (const int32_t slot : slots) together.clear(slot);
    for (int64_t t = 0; t < tokens; t += 2) {
      std::vector<Window> rows;
      for (const int s : {2, 0, 3, 1}) rows.push_back({&in[s], t, t + 2, slots[s], {}});
      rows.insert(rows.begin() + 1, {&in[0], t, t + 1, -1, {}});  // padding
      rows.push_back({&in[1], t, t, 3, {}});                      // an idle, poisoned slot: T = 0
      rows.push_back({&in[1], t, t + 2, -1, {}});
      const auto batch = run(c, together, Op::kStep, route, rows, t % 4 == 0 ? three : threads_);
      for (const size_t padding : {size_t{1}, size_t{6}})
        EXPECT_EQ(std::ranges::count(batch[padding], 0.0f), std::ssize(batch[padding]));
      const int where[] = {2, 4, 0, 3};
      for (int s = 0; s < 4; ++s) {
        const auto single = run(c, alone, Op::kStep, route, {{&in[s], t, t + 2, s, {}}}, one)[0];
        EXPECT_EQ(single, batch[where[s]]) << name(c) << " " << route_name(route);
        commit_step(alone.cursors[s], 2, route);
        commit_step(together.cursors[slots[s]], 2, route);
      }
    }
    for (int s = 0; s < 4; ++s)
      EXPECT_EQ(alone.contents(s), together.contents(slots[s])) << name(c);
    for (const int64_t unused : {1, 3, 4}) EXPECT_TRUE(together.untouched(unused));
  }
}

// pitfalls 9: another result at every launch.
TEST_P(RecurrentInvariance, RepeatsGiveTheSameBits) {
  const Case c = GetParam();
  const auto in = random_inputs(c, 30, 14);
  ThreadPool three(3);
  std::vector<float> first;
  std::vector<uint8_t> state;
  for (int repeat = 0; repeat < 5; ++repeat) {
    Pool pool(c, {.buffer_len = 7, .max_window = 2}, 1);
    pool.clear(0);
    const auto o = decode(c, pool, Route::kOutputOnly, in, 0, 30, 2, three);
    if (repeat == 0) first = o, state = pool.contents(0);
    EXPECT_EQ(o, first);
    EXPECT_EQ(pool.contents(0), state);
  }
}

// A fold in place or into another slot never changes later states; a snapshot leaves its source as
// it was, bit for bit, and goes on from where the source stood (pitfalls 17: history still pending
// when a block is published).
TEST_P(RecurrentInvariance, FoldsChangeNothingLater) {
  Case c = GetParam();
  c.checkpoint = DType::kFloat32;
  const int64_t tokens = 40;
  const auto in = random_inputs(c, tokens, 15);
  const RingConfig ring{.buffer_len = 8, .max_window = 2};
  Pool pool(c, ring, 4);
  pool.clear(0);
  pool.clear(1);
  decode(c, pool, Route::kOutputOnly, in, 0, 13, 1, threads_);
  decode(c, pool, Route::kOutputOnly, in, 0, 13, 1, threads_, 1);
  const auto before = pool.contents(0);
  const auto cursor = pool.cursors[0];
  fold(c, pool, 0, threads_, 2);
  EXPECT_EQ(pool.contents(0), before);
  const auto fields = [](const Cursor& x) {  // a comparison of memory would include the padding
    return std::tuple(x.ring_start, x.ring_count, x.ring_limit, x.fold_count);
  };
  EXPECT_EQ(fields(pool.cursors[0]), fields(cursor));
  fold(c, pool, 1, threads_);
  EXPECT_TRUE(std::ranges::equal(pool.slot(1), pool.slot(2)));
  EXPECT_TRUE(pool.untouched(3));

  const auto o = decode(c, pool, Route::kOutputOnly, in, 13, tokens, 2, threads_);
  const auto o_folded = decode(c, pool, Route::kOutputOnly, in, 13, tokens, 2, threads_, 1);
  const auto o_snapshot = decode(c, pool, Route::kOutputOnly, in, 13, tokens, 2, threads_, 2);
  EXPECT_EQ(o_folded, o_snapshot);
  EXPECT_LT(relative_error(o_folded, o), 2 * output_tolerance(c));
  for (const int32_t slot : {0, 1, 2}) fold(c, pool, slot, threads_);
  EXPECT_TRUE(std::ranges::equal(pool.slot(0), pool.slot(1)));
  EXPECT_TRUE(std::ranges::equal(pool.slot(0), pool.slot(2)));
}

// pitfalls 23: element offsets in 32 bits. The last slot of a pool of 2^32 elements; only what is
// touched takes memory.
TEST(RecurrentBigPool, OffsetsHaveSixtyFourBits) {
  const Case c{{Family::kGatedDelta, 2, 1, 64, 128}};
  const RingConfig ring{.buffer_len = 4};
  Pool small(c, ring, 1);
  small.clear(0);
  const int64_t slots = (int64_t{1} << 32) / small.elements();
  const auto slot = static_cast<int32_t>(slots - 1);
  const auto in = random_inputs(c, 20, 16);
  ThreadPool threads(1);
  const auto want = decode(c, small, Route::kOutputOnly, in, 0, 20, 1, threads);

  std::vector<Buffer> memory;
  const auto big = [&](PoolArray& array) {
    memory.emplace_back(slots * array.slot_bytes);
    return memory.back().as<void>();
  };
  RecurrentState state = small.state();
  state.checkpoint = big(small.checkpoint);
  state.ring_v = big(small.ring_v);
  state.ring_k = big(small.ring_k);
  state.ring_b = static_cast<float*>(big(small.ring_b));
  state.ring_g = static_cast<float*>(big(small.ring_g));
  std::vector<Cursor> cursors(slots, reset_cursor(ring));
  std::vector<float> got;
  for (int64_t t = 0; t < 20; ++t) {
    Call call(c, small, {{&in, t, t + 1, slot, {}}}, 1);
    begin_step(cursors[slot], 1, ring);
    call.p.state = state;
    call.p.batch.cursors = cursors.data();
    call.p.route = Route::kOutputOnly;
    cpu::recurrent_step(call.p, call.workspace(), threads);
    const auto o = call.outputs(0);
    got.insert(got.end(), o.begin(), o.end());
    commit_step(cursors[slot], 1, Route::kOutputOnly);
  }
  EXPECT_EQ(got, want);
}

}  // namespace
}  // namespace replayssm::testing
