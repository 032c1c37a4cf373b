#include "engine/verify.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/check.h"
#include "core/philox.h"
#include "engine/lookup_drafters.h"
#include "engine/scheduler.h"

namespace replayssm {
namespace {

using Weights = std::vector<std::pair<int32_t, double>>;

// Follows the model's text "10 11 12 ...", whatever row is asked.
Verdict follow(const Draft& draft, int32_t first = 10) {
  return follow_draft(draft, [&](int64_t, const std::vector<SampledToken>& chosen) {
    return SampledToken{.id = first + static_cast<int32_t>(chosen.size())};
  });
}

std::vector<int32_t> ids(const Verdict& verdict) {
  std::vector<int32_t> ids;
  for (const auto& token : verdict.tokens) ids.push_back(token.id);
  return ids;
}

TEST(FollowDraft, KeepsWhatTheModelWouldHaveChosen) {
  using Ids = std::vector<int32_t>;
  const struct {
    Draft draft;
    Ids tokens, rows;
  } cases[] = {
      {{}, {10}, {0}},
      {{.tokens = {10, 11, 12}, .parent = {}, .probability = {}}, {10, 11, 12, 13}, {0, 1, 2, 3}},
      {{.tokens = {9, 11, 12}, .parent = {}, .probability = {}}, {10}, {0}},
      {{.tokens = {10, 9, 12}, .parent = {}, .probability = {}}, {10, 11}, {0, 1}},
      // Two paths from the root, the second is right, and its second token has a wrong sibling.
      {{.tokens = {9, 11, 10, 8, 11}, .parent = {-1, 0, -1, 2, 2}, .probability = {}},
       {10, 11, 12},
       {0, 3, 5}},
      // The right token hangs on a wrong one.
      {{.tokens = {9, 10}, .parent = {-1, 0}, .probability = {}}, {10}, {0}},
  };
  for (const auto& [draft, tokens, rows] : cases) {
    const Verdict verdict = follow(draft);
    EXPECT_EQ(ids(verdict), tokens);
    EXPECT_EQ(verdict.rows, rows);
  }
}

TEST(FollowDraft, ARowThatTellsNoTokenEndsTheWindow) {
  const Draft draft{.tokens = {10, 11, 12}, .parent = {}, .probability = {}};
  const auto fails_at = [&](int64_t bad) {
    return follow_draft(draft, [&](int64_t row, const std::vector<SampledToken>& chosen) {
      if (row == bad) fail("no numbers");
      return SampledToken{.id = 10 + static_cast<int32_t>(chosen.size())};
    });
  };
  EXPECT_EQ(ids(fails_at(2)), (std::vector<int32_t>{10, 11}));
  EXPECT_THROW(fails_at(0), Error);
}

// Of `samples` draws, against probabilities: 99.9999% of such sums lie below.
void expect_distribution(const std::vector<int64_t>& counts, const std::vector<double>& p) {
  int64_t samples = 0;
  for (const int64_t count : counts) samples += count;
  double sum = 0;
  int64_t free = -1;
  for (size_t i = 0; i < p.size(); ++i) {
    const double expected = p[i] * static_cast<double>(samples);
    if (expected == 0) {
      EXPECT_EQ(counts[i], 0);
      continue;
    }
    const double difference = static_cast<double>(counts[i]) - expected;
    sum += difference * difference / expected;
    ++free;
  }
  // Wilson and Hilferty: the cube root of chi-square over its mean is nearly normal.
  const auto k = static_cast<double>(free);
  const double z = (std::cbrt(sum / k) - (1 - 2 / (9 * k))) / std::sqrt(2 / (9 * k));
  EXPECT_LT(z, 4.8);
}

TEST(Rejection, PreservesTheModelsDistribution) {
  const std::vector<double> p = {0.35, 0.0, 0.25, 0.05, 0.2, 0.15};
  const std::vector<std::vector<double>> drafts = {{0.05, 0.2, 0.25, 0.3, 0.0, 0.2},
                                                   {0.35, 0.0, 0.25, 0.05, 0.2, 0.15},
                                                   {0.0, 1.0, 0.0, 0.0, 0.0, 0.0},
                                                   {0.0, 0.0, 0.0, 1.0, 0.0, 0.0}};
  const auto weights = [](const std::vector<double>& values) {
    Weights result;
    for (size_t i = 0; i < values.size(); ++i)
      if (values[i] > 0) result.emplace_back(static_cast<int32_t>(i), values[i]);
    return result;
  };
  for (const auto& q : drafts) {
    constexpr int64_t kSamples = 200000;
    std::vector<int64_t> counts(p.size());
    int64_t accepted = 0;
    for (int64_t i = 0; i < kSamples; ++i) {
      const int32_t drafted = draw_from(weights(q), uniform(7, i, kDraftStream));
      const Rejection result = reject_or_accept(weights(p), weights(q), drafted, 7, i);
      ++counts[result.token];
      accepted += result.accepted;
    }
    expect_distribution(counts, p);
    double overlap = 0;
    for (size_t i = 0; i < p.size(); ++i) overlap += std::min(p[i], q[i]);
    EXPECT_NEAR(static_cast<double>(accepted) / kSamples, overlap, 0.006);
  }
}

TEST(SimulatedAcceptance, HasTheMeanThatIsAskedFor) {
  for (const double length : {1.0, 1.7, 3.28, 4.9, 5.0}) {
    constexpr int64_t kDrafts = 4, kSamples = 100000;
    const SimulatedAcceptance simulated(length, kDrafts);
    double sum = 0;
    for (int64_t i = 0; i < kSamples; ++i) {
      const int64_t accepted = simulated.draw(kDrafts, 3, i);
      ASSERT_TRUE(accepted >= 0 && accepted <= kDrafts);
      sum += 1 + static_cast<double>(accepted);
    }
    EXPECT_NEAR(sum / kSamples, length, 0.02);
  }
}

Draft drafted(Drafter& drafter, std::vector<int32_t> text, int64_t depth) {
  Sequence sequence;
  sequence.tokens = std::move(text);
  Draft draft;
  const DraftRequest request{.sequence = &sequence, .depth = depth, .draft = &draft};
  drafter.propose({&request, 1});
  return draft;
}

using Ids = std::vector<int32_t>;

TEST(NgramDrafter, ContinuesTheLongestLatestMatch) {
  NgramDrafter drafter({.lookup_min = 2, .lookup_max = 3});
  EXPECT_EQ(drafted(drafter, {1, 2, 3, 4}, 3).tokens, Ids{});
  EXPECT_EQ(drafted(drafter, {1, 2, 9, 8, 7, 1, 2}, 3).tokens, (Ids{9, 8, 7}));
  EXPECT_EQ(drafted(drafter, {1, 2, 9, 1, 2, 8, 5, 1, 2}, 2).tokens, (Ids{8, 5}));
  EXPECT_EQ(drafted(drafter, {4, 1, 2, 9, 5, 1, 2, 8, 4, 1, 2}, 1).tokens, Ids{9});
  EXPECT_EQ(drafted(drafter, {1, 2, 1, 2, 1, 2}, 5).tokens, (Ids{1, 2, 1, 2, 1}));
  EXPECT_EQ(drafted(drafter, {3, 3}, 2).tokens, Ids{});
  EXPECT_EQ(drafted(drafter, {3, 3, 3}, 2).tokens, (Ids{3, 3}));
}

TEST(NgramDrafter, BranchesWhereTheTextHas) {
  NgramDrafter drafter({.tree_width = 2, .lookup_min = 2, .lookup_max = 3});
  const Draft draft = drafted(drafter, {1, 2, 9, 6, 1, 2, 8, 5, 1, 2, 9, 7, 1, 2}, 2);
  EXPECT_EQ(draft.tokens, (Ids{9, 7, 8, 5}));
  EXPECT_EQ(draft.parent, (Ids{-1, 0, -1, 2}));
}

TEST(SuffixAutomaton, FindsTheLongestRepeatedSuffix) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    SuffixAutomaton automaton;
    std::vector<int32_t> text;
    for (int64_t i = 0; i < 80; ++i) {
      text.push_back(static_cast<int32_t>(uniform(seed, i) * 3));
      automaton.append(text.back());
      int64_t longest = 0;
      for (int64_t end = 1; end < std::ssize(text); ++end) {
        int64_t length = 0;
        while (length < end && text[end - 1 - length] == text[text.size() - 1 - length]) ++length;
        longest = std::max(longest, length);
      }
      ASSERT_EQ(automaton.length(automaton.repeated_suffix()), longest);
    }
  }
}

TEST(SuffixDrafter, PrefersWhatFollowedMostOften) {
  SuffixDrafter drafter({.lookup_min = 2});
  EXPECT_EQ(drafted(drafter, {1, 2, 9, 1, 2, 9, 1, 2, 8, 1, 2}, 1).tokens, Ids{9});
  drafter.forget(0);
  EXPECT_EQ(drafted(drafter, {1, 2, 3}, 4).tokens, Ids{});
}

}  // namespace
}  // namespace replayssm
