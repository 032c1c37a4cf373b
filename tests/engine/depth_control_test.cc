// Depths of drafts against passes whose cost is known.
#include "engine/depth_control.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/philox.h"
#include "engine/scheduler.h"

namespace replayssm {
namespace {

TEST(CostCurve, InterpolatesAndForgets) {
  CostCurve curve;
  EXPECT_TRUE(curve.empty());
  curve.add(4, 2);
  EXPECT_EQ(curve.at(1), 2);
  EXPECT_EQ(curve.at(100), 2);
  curve.add(8, 4);
  EXPECT_EQ(curve.at(6), 3);
  EXPECT_EQ(curve.at(12), 6);
  curve.add(8, 400);  // one slow pass
  EXPECT_LT(curve.at(8), 6);
  EXPECT_EQ(curve.age(4), 2);
  EXPECT_GT(curve.age(5), 1000);
  for (int i = 0; i < 100; ++i) curve.add(8, 1);
  EXPECT_NEAR(curve.at(8), 1, 1e-6);
}

struct Case {
  const char* name;
  std::function<double(int64_t)> cost;  // of a pass over so many rows
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"bound by memory", [](int64_t) { return 1.0; }},
      {"bound by arithmetic", [](int64_t rows) { return static_cast<double>(rows); }},
      {"with a knee", [](int64_t rows) { return std::max(1.0, static_cast<double>(rows) / 24); }},
      {"in between", [](int64_t rows) { return 8 + static_cast<double>(rows); }}};
  return all;
}

// Tokens per second with drafts whose tokens are accepted with probability `rate`. depth < 0: as
// the control chooses.
double speed(const Case& c, double rate, int64_t sequences, int64_t depth) {
  constexpr int64_t kMost = 4, kPasses = 4000;
  DepthControl control(sequences * (1 + kMost), depth < 0);
  std::vector<Sequence> all(sequences);
  std::vector<Draft> drafts(sequences);
  double seconds = 0;
  int64_t tokens = 0, drawn = 0;
  for (int64_t pass = 0; pass < kPasses; ++pass) {
    std::vector<DraftRequest> requests;
    for (int64_t s = 0; s < sequences; ++s)
      requests.push_back(
          {.sequence = &all[s], .depth = depth < 0 ? kMost : depth, .draft = &drafts[s]});
    control.choose(requests);
    int64_t rows = sequences, drafted = 0;
    for (int64_t s = 0; s < sequences; ++s) {
      int64_t accepted = 0;
      while (accepted < requests[s].depth && uniform(5, drawn++) < rate) ++accepted;
      all[s].acceptance.add(accepted, requests[s].depth);
      tokens += 1 + accepted;
      drafted += requests[s].depth;
    }
    rows += drafted;
    const double noise = 0.95 + 0.1 * uniform(6, pass);
    control.time_draft(sequences, drafted, 0);
    control.time_pass(sequences, rows, c.cost(rows) * noise);
    seconds += c.cost(rows) * noise;
  }
  return static_cast<double>(tokens) / seconds;
}

TEST(DepthControl, IsNeverSlowerThanPlainDecodingAndNearlyAsFastAsTheBestDepth) {
  for (const Case& c : cases()) {
    for (const double rate : {0.02, 0.4, 0.9}) {
      for (const int64_t sequences : {1, 4, 32}) {
        const double plain = speed(c, rate, sequences, 0), chosen = speed(c, rate, sequences, -1);
        double best = plain;
        for (int64_t depth = 1; depth <= 4; ++depth)
          best = std::max(best, speed(c, rate, sequences, depth));
        EXPECT_GE(chosen, 0.98 * plain) << c.name << " rate " << rate << " x " << sequences;
        EXPECT_GE(chosen, 0.9 * best) << c.name << " rate " << rate << " x " << sequences;
      }
    }
  }
}

}  // namespace
}  // namespace replayssm
