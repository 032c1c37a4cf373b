// Depths of drafts against passes whose cost is known.
#include "engine/depth_control.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "core/philox.h"
#include "engine/scheduler.h"

namespace replayssm {
namespace {

void add(CostCurve& curve, int64_t count, double seconds, int times = 3) {
  for (int i = 0; i < times; ++i) curve.add(count, seconds);
}

TEST(CostCurve, InterpolatesAndForgets) {
  CostCurve curve;
  EXPECT_EQ(curve.at(4), 0);
  add(curve, 4, 2);
  EXPECT_EQ(curve.at(1), 2);
  EXPECT_EQ(curve.at(100), 2);
  add(curve, 8, 4);
  EXPECT_EQ(curve.at(6), 3);
  EXPECT_EQ(curve.at(12), 6);
  curve.add(8, 400);  // one slow pass
  EXPECT_LT(curve.at(8), 6);
  EXPECT_EQ(curve.age(4), 4);
  EXPECT_GT(curve.age(5), 1);
  EXPECT_GT(curve.age(64), 1000000);
  add(curve, 8, 1, 100);
  EXPECT_NEAR(curve.at(8), 1, 1e-6);
  add(curve, 8, 1, 2000);
  EXPECT_NEAR(curve.at(4), 1, 1e-6);
  EXPECT_NEAR(curve.at(1000), 1, 1e-6);
}

TEST(CostCurve, SimilarCountsAreOneInTheirMean) {
  CostCurve curve;
  add(curve, 0, 1);
  for (const int64_t count : {97, 101, 99, 100, 98, 96, 97, 102, 103, 99, 100, 101})
    curve.add(count, 1 + 0.01 * static_cast<double>(count));
  EXPECT_NEAR(curve.at(100), 2, 0.05);
  EXPECT_NEAR(curve.at(50), 1.5, 0.03);
  EXPECT_NEAR(curve.at(150), 2.5, 0.08);
}

// Passes that prepare what all later ones of the kind use.
TEST(CostCurve, FirstPassesOfAKindAreNotItsCost) {
  CostCurve curve;
  add(curve, 0, 1);
  curve.add(40, 50);
  curve.add(40, 20);
  EXPECT_EQ(curve.at(40), 1);  // not known yet
  curve.add(40, 1.5);
  EXPECT_EQ(curve.at(40), 1.5);
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

// What a drafter and a device do besides.
struct World {
  bool slow_first = false;   // the first passes of a number of rows take twenty times as long
  bool shy_drafter = false;  // drafts are shorter than wanted, or not there
  bool mixed = false;        // every other request's drafts are wrong
};

// Tokens per second, without what the first passes prepare, with drafts whose tokens are accepted
// with probability `rate`. depth < 0: as the control chooses.
double speed(const Case& c, const World& world, double rate, int64_t sequences, int64_t depth) {
  constexpr int64_t kMost = 4, kPasses = 2500, kSlow = 2;
  DepthControl control(sequences * (1 + kMost), depth < 0);
  std::vector<Sequence> all(sequences);
  std::vector<Draft> drafts(sequences);
  std::map<int64_t, int64_t> passes;  // by rows
  double seconds = 0;
  int64_t tokens = 0, drawn = 0;
  for (int64_t pass = 0; pass < kPasses; ++pass) {
    std::vector<DraftRequest> requests;
    for (int64_t s = 0; s < sequences; ++s)
      requests.push_back(
          {.sequence = &all[s], .depth = depth < 0 ? kMost : depth, .draft = &drafts[s]});
    control.choose(requests);
    int64_t drafted = 0;
    for (int64_t s = 0; s < sequences; ++s) {
      int64_t size = requests[s].depth, accepted = 0;
      if (world.shy_drafter)
        size = std::min(size, static_cast<int64_t>(uniform(7, pass * sequences + s) * (kMost + 1)));
      const double own_rate = world.mixed && s % 2 == 1 ? 0.02 : rate;
      while (accepted < size && uniform(5, drawn++) < own_rate) ++accepted;
      control.count(all[s].acceptance, accepted, size);
      tokens += 1 + accepted;
      drafted += size;
    }
    const int64_t rows = sequences + drafted;
    const double noise = 0.95 + 0.1 * uniform(6, pass), cost = c.cost(rows) * noise;
    control.time_draft(sequences, drafted, 0);
    const bool slow = world.slow_first && passes[rows / 16]++ < kSlow;
    control.time_pass(sequences, rows, slow ? 20 * cost : cost);
    seconds += cost;
  }
  return static_cast<double>(tokens) / seconds;
}

TEST(DepthControl, IsNeverSlowerThanPlainDecodingAndNearlyAsFastAsTheBestDepth) {
  for (const Case& c : cases()) {
    for (const World& world :
         {World{}, World{.slow_first = true}, World{.shy_drafter = true}, World{.mixed = true}}) {
      for (const double rate : {0.02, 0.4, 0.9}) {
        for (const int64_t sequences : {1, 4, 32}) {
          SCOPED_TRACE(::testing::Message() << c.name << " rate " << rate << " x " << sequences
                                            << (world.slow_first ? " slow first passes" : "")
                                            << (world.shy_drafter ? " short drafts" : "")
                                            << (world.mixed ? " mixed" : ""));
          const double plain = speed(c, world, rate, sequences, 0),
                       chosen = speed(c, world, rate, sequences, -1);
          double best = plain;
          for (int64_t depth = 1; depth <= 4; ++depth)
            best = std::max(best, speed(c, world, rate, sequences, depth));
          EXPECT_GE(chosen, 0.98 * plain);
          EXPECT_GE(chosen, 0.9 * best);
        }
      }
    }
  }
}

}  // namespace
}  // namespace replayssm
