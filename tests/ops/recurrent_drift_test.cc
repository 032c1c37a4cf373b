// A hundred thousand decode steps: a state behind a ring is at least as good as one that is updated
// and stored at every step.
#include <gtest/gtest.h>

#include "ops/recurrent_harness.h"
#include "ops/recurrent_oracle.h"

namespace replayssm::testing {
namespace {

constexpr int64_t kSteps = 100'000, kPeriod = 1000, kSample = 5'000;

// Memory of some thousand tokens, so that errors can add up.
Inputs long_memory(const Case& c) {
  Inputs in = random_inputs(c, kPeriod, 61);
  for (float& g : in.g) g *= 1e-3f;
  for (float& b : in.b) b *= 0.1f;
  for (float& gate : in.gate) gate = -6 + 0.1f * gate;
  return in;
}

// The reference's state at every sample.
std::vector<std::vector<double>> exact_states(const Case& c, const Inputs& in) {
  std::vector<reference::Token> tokens;
  for (int64_t t = 0; t < kPeriod; ++t) tokens.push_back(token_of(c, in, t, 0));
  reference::Sequence sequence(c.shape.family, c.shape.head_dim, c.shape.state_dim);
  std::vector<std::vector<double>> states;
  for (int64_t t = 1; t <= kSteps; ++t) {
    sequence.commit(tokens[(t - 1) % kPeriod]);
    if (t % kSample == 0) states.emplace_back(sequence.state().begin(), sequence.state().end());
  }
  return states;
}

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
      const auto in = long_memory(c);
      const auto exact = exact_states(c, in);
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
