// The read copy: rounded once per fold, read between folds, never part of the recurrence.
#include <gtest/gtest.h>

#include "ops/read_copy_check.h"
#include "ops/recurrent_harness.h"
#include "ops/recurrent_oracle.h"

namespace replayssm::testing {
namespace {

constexpr DType kCopies[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                             DType::kInt8};

class ReadCopies : public ::testing::TestWithParam<Case> {
 protected:
  ThreadPool threads_{2};
};

// Every shape with every copy would be five times the work: they take turns.
std::vector<Case> copied_cases() {
  std::vector<Case> list;
  for (size_t i = 0; i < cases().size(); ++i) {
    Case c = cases()[i];
    c.checkpoint = DType::kFloat32;
    c.read_copy = kCopies[i % 5];
    list.push_back(c);
    if (dtype_bytes(*c.read_copy) > 1) {
      c.read_copy = i % 2 == 0 ? DType::kInt8 : DType::kFloat8E4M3;
      list.push_back(c);
    }
  }
  return list;
}

INSTANTIATE_TEST_SUITE_P(Shapes, ReadCopies, ::testing::ValuesIn(copied_cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

TEST_P(ReadCopies, EqualTheEncodedCheckpointAfterAnySchedule) {
  const Case c = GetParam();
  Case plain = c;
  plain.read_copy.reset();
  const auto in = random_inputs(c, 40, 41);
  std::mt19937 random(42);
  for (int trial = 0; trial < 3; ++trial) {
    const RingConfig ring{.buffer_len = 1 + static_cast<int32_t>(random() % 9),
                          .max_window = 1 + static_cast<int32_t>(random() % 4)};
    Pool with(c, ring, 2), without(plain, ring, 2);
    with.clear(0);
    without.clear(0);
    int64_t t = random() % 20;
    for (auto [layer, pool] : {std::pair{&c, &with}, {&plain, &without}}) {
      run(*layer, *pool, Op::kPrefill, Route::kOutputOnly, {{&in, 0, t, 0, {}}}, threads_);
      commit_prefill(pool->cursors[0], t, ring);
    }
    if (t > 0) expect_copy_of_checkpoint(c, with, 0);
    while (t < 40) {
      const Route route = kRoutes[trial == 0 ? 0 : 1 + random() % 2];
      const int64_t end = std::min<int64_t>(40, t + 1 + random() % ring.max_window);
      const auto before = with.checkpoint.bytes;
      decode(c, with, route, in, t, end, end - t, threads_);
      decode(plain, without, route, in, t, end, end - t, threads_);
      t = end;
      const bool stored = with.checkpoint.bytes != before;
      // Rounding of the copy never enters the recurrence.
      ASSERT_EQ(with.checkpoint.bytes, without.checkpoint.bytes) << name(c) << " at " << t;
      if (stored) expect_copy_of_checkpoint(c, with, 0);
    }
    fold(c, with, 0, threads_, 1);  // a snapshot brings its copy
    expect_copy_of_checkpoint(c, with, 1);
    fold(c, with, 0, threads_);
    expect_copy_of_checkpoint(c, with, 0);
    EXPECT_EQ(with.contents(0).size(), with.contents(1).size());
    EXPECT_TRUE(std::ranges::equal(with.slot(0), with.slot(1)));
  }
}

// The output is the readout of the decoded copy, to within fp32, and of the copy alone: between
// folds the checkpoint may as well be NaN. A step that folds reads the fresh fp32 rows.
TEST_P(ReadCopies, AreAllThatAStepWithoutFoldReads) {
  const Case c = GetParam();
  const auto& s = c.shape;
  const int64_t tokens = 45, window = 3;
  const auto in = random_inputs(c, tokens, 43);
  for (const Route route : {Route::kStateAndOutput, Route::kOutputOnly}) {
    Pool pool(c, {.buffer_len = 9, .max_window = 3}, 1);
    pool.clear(0);
    Oracle oracle(c);
    for (int64_t t = 0; t < tokens; t += window) {
      const bool folds = pool.cursors[0].ring_count + window > pool.cursors[0].ring_limit;
      std::vector<double> want;
      if (folds) {
        want = oracle.outputs(in, t, t + window);
      } else {
        const int64_t first = t - pool.cursors[0].ring_count;
        want.resize(window * s.heads * s.head_dim);
        for (int64_t h = 0; h < s.heads; ++h) {
          std::vector<double> state;
          for (int64_t r = h * s.head_dim; r < (h + 1) * s.head_dim; ++r) {
            const auto row = reference::decode_row(*c.read_copy, stored_row(c, pool, 0, r));
            state.insert(state.end(), row.begin(), row.end());
          }
          std::vector<reference::Token> path;
          for (int64_t j = first; j < t; ++j) path.push_back(token_of(c, in, j, h));
          for (int64_t i = 0; i < window; ++i) {
            path.push_back(token_of(c, in, t + i, h));
            const auto o =
                finished(c, in, t + i, h, reference::read_through(s.family, path, state));
            std::ranges::copy(o, want.begin() + (i * s.heads + h) * s.head_dim);
          }
        }
      }
      const auto checkpoint = pool.checkpoint;
      if (!folds) std::ranges::fill(pool.checkpoint.bytes, 0xff);
      const auto o = run(c, pool, Op::kStep, route, {{&in, t, t + window, 0, {}}}, threads_)[0];
      EXPECT_LT(relative_error(o, want), output_tolerance(c))
          << name(c) << " " << route_name(route) << (folds ? " folds" : "");
      if (!folds) {
        EXPECT_TRUE(std::ranges::all_of(pool.checkpoint.bytes, [](auto b) { return b == 0xff; }));
        pool.checkpoint = checkpoint;
      }
      commit_step(pool.cursors[0], window, route);
      for (int64_t i = 0; i < window; ++i) oracle.commit(in, t + i);
    }
  }
}

// |o - o_exact| <= sum_k |dS_k| |t_k| with dS half a step of the format: half the scale for int8, a
// sixteenth of the value (but at least half the smallest step) for e4m3. The two outputs share
// every other error.
TEST_P(ReadCopies, ReadoutErrorStaysWithinItsBound) {
  Case c = GetParam();
  c.finish = false;
  c.output = DType::kFloat32;
  const auto& s = c.shape;
  const auto in = random_inputs(c, 21, 44);
  Case plain = c;
  plain.read_copy.reset();
  const RingConfig ring{.buffer_len = 16};
  Pool with(c, ring, 1), without(plain, ring, 1);
  with.clear(0);
  without.clear(0);
  decode(c, with, Route::kOutputOnly, in, 0, 20, 1, threads_);  // folds before token 17
  decode(plain, without, Route::kOutputOnly, in, 0, 20, 1, threads_);
  const auto got = decode(c, with, Route::kOutputOnly, in, 20, 21, 1, threads_);
  const auto want = decode(plain, without, Route::kOutputOnly, in, 20, 21, 1, threads_);
  const auto rows = checkpoint_rows(with, 0);
  for (int64_t h = 0; h < s.heads; ++h) {
    std::vector<reference::Token> path;
    for (int64_t t = 16; t <= 20; ++t) path.push_back(token_of(c, in, t, h));
    const auto walk = reference::walk_back(s.family, path);
    for (int64_t v = 0; v < s.head_dim; ++v) {
      const int64_t r = h * s.head_dim + v;
      const float scale = stored_row(c, with, 0, r).scale;
      double bound = 0, size = 0;
      for (int64_t k = 0; k < s.state_dim; ++k) {
        const double x = std::abs(rows[r * s.state_dim + k]), t = std::abs(walk.t[k]);
        const double relative = *c.read_copy == DType::kFloat16      ? 0x1p-11
                                : *c.read_copy == DType::kBFloat16   ? 0x1p-8
                                : *c.read_copy == DType::kFloat8E4M3 ? 0x1p-4
                                                                     : 0;
        const double least = *c.read_copy == DType::kInt8         ? scale / 2
                             : *c.read_copy == DType::kFloat8E4M3 ? scale * 0x1p-10
                             : *c.read_copy == DType::kFloat16    ? 0x1p-25
                                                                  : 0;
        bound += std::max(x * relative, least) * t;
        size += x * t;
      }
      // What fp32 adds: sums of state_dim products and of the path's.
      for (size_t j = 0; j < path.size(); ++j) size += std::abs(walk.c[j] * path[j].v[v]);
      EXPECT_LE(std::abs(got[r] - want[r]), bound + fp32_tolerance(c) * size) << name(c);
    }
  }
}

// Rows that grow and shrink by powers of ten between folds, rows of zeros, and rows too small for a
// scale: finite, and the scale belongs to the row's latest values.
TEST(ReadCopyExtremes, ScalesFollowTheRows) {
  for (const DType dtype : {DType::kFloat8E4M3, DType::kInt8}) {
    Case c{{Family::kMamba2, 2, 1, 6, 33}};
    c.read_copy = dtype;
    auto in = random_inputs(c, 48, 45);
    for (int64_t t = 0; t < 48; ++t) {
      const float size = t < 12 ? 1.0f : t < 24 ? 1e6f : t < 36 ? 1e-6f : 0.0f;
      for (int64_t i = 0; i < 12; ++i) in.v[t * 12 + i] *= i == 0 ? 0 : size;
      in.g[2 * t] = in.g[2 * t + 1] = -8;
    }
    ThreadPool threads(1);
    Pool pool(c, {.buffer_len = 4}, 1);
    pool.clear(0);
    for (int64_t t = 0; t < 48; ++t) {
      const auto o = decode(c, pool, Route::kOutputOnly, in, t, t + 1, 1, threads);
      EXPECT_TRUE(std::ranges::all_of(o, [](float x) { return std::isfinite(x); })) << t;
      expect_copy_of_checkpoint(c, pool, 0);
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
