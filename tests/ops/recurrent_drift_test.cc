// A hundred thousand decode steps: a state behind a ring is at least as good as one that is updated
// and stored at every step.
#include <gtest/gtest.h>

#include "ops/long_run.h"

namespace replayssm::testing {
namespace {

constexpr int64_t kPeriod = 1000, kSample = 5'000;

struct Drift {
  double largest = 0;  // relative error of the state at any sample
  std::vector<uint8_t> checkpoint;
};

Drift drift(const Case& c, Route route, const Inputs& in,
            const std::vector<std::vector<double>>& exact) {
  ThreadPool threads(1);
  Pool pool(c, {.buffer_len = 16}, 1);
  pool.clear(0);
  std::vector<Call> calls;
  for (int64_t t = 0; t < kPeriod; ++t)
    calls.emplace_back(c, pool, std::vector<Window>{{&in, t, t + 1, 0, {}}}, 1);
  Drift result;
  for (int64_t t = 1; t <= kSteps; ++t) {
    Call& call = calls[(t - 1) % kPeriod];
    begin_step(pool.cursors[0], 1, pool.ring());
    call.p.route = route;
    cpu::recurrent_step(call.p, call.workspace(), threads);
    commit_step(pool.cursors[0], 1, route);
    if (t % kSample == 0) {
      fold(c, pool, 0, threads);
      result.largest =
          std::max(result.largest, relative_error(pool.slot_values(0), exact[t / kSample - 1]));
    }
  }
  result.checkpoint = pool.checkpoint.bytes;
  return result;
}

TEST(RecurrentDrift, ReplayIsAtLeastAsGoodAsConventional) {
  for (const Family family : {Family::kMamba2, Family::kGatedDelta, Family::kKimiDelta}) {
    for (const DType checkpoint : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      const Case c{{family, 1, 1, 8, 16}, DType::kBFloat16, checkpoint};
      const auto in = long_memory(c, kPeriod);
      const auto exact = exact_states(c, in, kPeriod, kSample);
      const Drift conventional = drift(c, Route::kConventional, in, exact);
      const Drift replay = drift(c, Route::kOutputOnly, in, exact);
      SCOPED_TRACE(name(c));
      EXPECT_LE(replay.largest, conventional.largest);
      if (checkpoint == DType::kFloat32) {
        EXPECT_EQ(replay.checkpoint, conventional.checkpoint);
        // Every token's decay is rounded once; a state remembers up to 4,000 tokens.
        EXPECT_LT(replay.largest, 4'000 * 0x1p-24);
      }
    }
  }
}

}  // namespace
}  // namespace replayssm::testing
