#include "engine/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/check.h"

namespace replayssm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

const std::vector<float> kLogits = {0.3F, 2.1F, -1.0F, 1.4F, 1.4F, 0.9F, -kInfinity, -3.0F, 1.9F};
const std::vector<int32_t> kPrompt = {1, 3, 3};
const std::vector<int32_t> kOutput = {8, 4, 8};

// The exact probabilities of every token, by plain loops over the whole vocabulary.
std::vector<double> exact_probabilities(const SamplingParams& params) {
  std::vector<double> logits(kLogits.begin(), kLogits.end());
  for (size_t id = 0; id < logits.size(); ++id) {
    const auto in_output = std::ranges::count(kOutput, static_cast<int32_t>(id));
    const auto in_prompt = std::ranges::count(kPrompt, static_cast<int32_t>(id));
    double& x = logits[id];
    if (in_output + in_prompt > 0) {
      x = x > 0 ? x / params.repetition_penalty : x * params.repetition_penalty;
    }
    x -= params.frequency_penalty * static_cast<double>(in_output);
    if (in_output > 0) x -= params.presence_penalty;
    for (const auto& [biased, bias] : params.logit_bias) {
      if (biased == static_cast<int32_t>(id)) x += bias;
    }
    x /= params.temperature;
  }
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  const size_t top_k = params.top_k > 0 ? static_cast<size_t>(params.top_k) : order.size();
  order.resize(std::min(order.size(), top_k));
  const auto normalised = [&] {
    std::vector<double> p(logits.size(), 0.0);
    double total = 0;
    for (const size_t id : order) total += p[id] = std::exp(logits[id]);
    for (double& value : p) value /= total;
    return p;
  };
  const std::vector<double> p = normalised();
  double reached = 0;
  size_t kept = 0;
  while (kept < order.size() && (params.top_p == 1 || reached < params.top_p)) {
    reached += p[order[kept++]];
  }
  order.resize(kept);
  std::erase_if(order, [&](size_t id) { return p[id] < params.min_p * p[order[0]]; });
  return normalised();
}

const std::vector<SamplingParams> kSettings = {
    {.temperature = 1},
    {.temperature = 0.3},
    {.temperature = 5},
    {.temperature = 1, .top_k = 1},
    {.temperature = 1, .top_k = 3},  // cuts between two equal logits
    {.temperature = 1, .top_k = 1000},
    {.temperature = 1, .top_p = 0.5},
    {.temperature = 1, .top_p = 1e-9},
    {.temperature = 1, .min_p = 0.4},
    {.temperature = 1, .min_p = 1},
    {.temperature = 1.5, .top_k = 6, .top_p = 0.8, .min_p = 0.25},
    {.temperature = 1, .repetition_penalty = 1.7},
    {.temperature = 1, .repetition_penalty = 0.6},
    {.temperature = 1, .presence_penalty = 0.7, .frequency_penalty = 0.4},
    {.temperature = 1, .logit_bias = {{1, 2.5F}, {3, -100}}},
    {.temperature = 0.8,
     .top_k = 5,
     .top_p = 0.9,
     .repetition_penalty = 1.2,
     .presence_penalty = -0.5,
     .frequency_penalty = 0.3},
};

// Pearson's statistic of 20,000 draws against the exact probabilities. With at most 8 degrees of
// freedom a right sampler exceeds 44 with probability 6e-7; draws are fixed by the seeds.
TEST(Sample, DrawsFromTheExactDistribution) {
  constexpr int kDraws = 20000;
  for (size_t setting = 0; setting < kSettings.size(); ++setting) {
    for (const bool by_position : {false, true}) {
      SamplingParams params = kSettings[setting];
      const std::vector<double> p = exact_probabilities(params);
      std::vector<int> count(p.size(), 0);
      for (int i = 0; i < kDraws; ++i) {
        params.seed = by_position ? 7 : i;
        ++count[sample(kLogits, params, kPrompt, kOutput, by_position ? i : 3).id];
      }
      double statistic = 0;
      for (size_t id = 0; id < p.size(); ++id) {
        if (p[id] == 0) {
          EXPECT_EQ(count[id], 0) << "setting " << setting << " token " << id;
          continue;
        }
        const double expected = kDraws * p[id];
        statistic += (count[id] - expected) * (count[id] - expected) / expected;
      }
      EXPECT_LT(statistic, 44) << "setting " << setting << " by position " << by_position;
    }
  }
}

// Wide distributions take the path that sorts only part of the vocabulary.
TEST(Sample, TopPKeepsTheSmallestSetOfALargeVocabulary) {
  constexpr int kVocab = 5000;
  std::vector<float> logits(kVocab, 0.0F);
  for (int id = 0; id < kVocab; id += 2) logits[id] = -50;  // half of them all but impossible
  const SamplingParams params{.temperature = 1, .top_p = 0.4};
  int32_t largest = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    SamplingParams seeded = params;
    seeded.seed = seed;
    const int32_t id = sample(logits, seeded, {}, {}, 0).id;
    ASSERT_EQ(id % 2, 1);
    largest = std::max(largest, id);
  }
  // 0.4 of 2,500 equal tokens, lower ids first, are the odd ids up to 1,999 (or one further where
  // rounding of the cumulated sum asks for it).
  EXPECT_GE(largest, 1990);
  EXPECT_LE(largest, 2001);
}

TEST(Sample, LimitsThatKeepAllChangeNoDraw) {
  const std::vector<float> logits = {0.3F, 2.1F, -1.0F, 1.4F, 0.9F};
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const SamplingParams free{.temperature = 1, .seed = seed};
    SamplingParams top_p = free, top_k = free;
    top_p.top_p = 0.9999;
    top_k.top_k = 5;
    const int32_t want = sample(logits, free, {}, {}, 0).id;
    EXPECT_EQ(sample(logits, top_p, {}, {}, 0).id, want) << seed;
    EXPECT_EQ(sample(logits, top_k, {}, {}, 0).id, want) << seed;
  }
}

TEST(Sample, GreedyTakesTheLargestAndTiesGoToTheLowerId) {
  EXPECT_EQ(sample(kLogits, {}, {}, {}, 0).id, 1);
  const std::vector<float> ties = {-kInfinity, 2, 5, 5, 5};
  EXPECT_EQ(sample(ties, {}, {}, {}, 0).id, 2);
  const std::vector<int32_t> prompt = {2};
  EXPECT_EQ(sample(ties, {.repetition_penalty = 1.1}, prompt, {}, 0).id, 3);
  EXPECT_EQ(sample(ties, {.presence_penalty = 1}, prompt, {}, 0).id, 2);  // output only
  EXPECT_EQ(sample(ties, {.presence_penalty = 1}, {}, prompt, 0).id, 3);
}

TEST(Sample, TinyTemperaturesAreGreedy) {
  for (const double temperature : {1e-300, 1e-6}) {
    EXPECT_EQ(sample(kLogits, {.temperature = temperature}, {}, {}, 5).id, 1);
  }
}

TEST(Sample, IsAFunctionOfItsArguments) {
  const SamplingParams params{.temperature = 1, .seed = 11};
  for (int64_t position = 0; position < 50; ++position) {
    EXPECT_EQ(sample(kLogits, params, kPrompt, kOutput, position).id,
              sample(kLogits, params, kPrompt, kOutput, position).id);
  }
}

TEST(Sample, LogprobsAreThoseOfTheUnmodifiedDistribution) {
  const SamplingParams params{
      .temperature = 2, .top_k = 2, .repetition_penalty = 1.3, .seed = 4, .logprobs = 3};
  double total = 0;
  for (const float logit : kLogits) total += std::exp(static_cast<double>(logit));
  const SampledToken token = sample(kLogits, params, kPrompt, kOutput, 3);
  // One rounding to float of a value below 8.
  EXPECT_NEAR(token.logprob, kLogits[token.id] - std::log(total), 8 * 0x1p-24);
  std::vector<int32_t> ids;
  for (const auto& [id, logprob] : token.top_logprobs) {
    ids.push_back(id);
    EXPECT_NEAR(logprob, kLogits[id] - std::log(total), 8 * 0x1p-24);
  }
  EXPECT_THAT(ids, ElementsAre(1, 8, 3));
}

TEST(Sample, LogprobsMayAskForNoneOrForMoreThanThereAre) {
  EXPECT_TRUE(sample(kLogits, {.logprobs = 0}, {}, {}, 0).top_logprobs.empty());
  EXPECT_LT(sample(kLogits, {.logprobs = 0}, {}, {}, 0).logprob, 0);
  EXPECT_EQ(sample(kLogits, {.logprobs = 1000}, {}, {}, 0).top_logprobs.size(), kLogits.size());
  EXPECT_EQ(sample(kLogits, {}, {}, {}, 0).logprob, 0);
}

TEST(LogSumExp, SurvivesLargeLogits) {
  const std::vector<float> logits = {1e30F, 1e30F, -1e30F};
  EXPECT_DOUBLE_EQ(log_sum_exp(logits), static_cast<double>(1e30F) + std::log(2.0));
  const std::vector<float> one = {-700};
  EXPECT_DOUBLE_EQ(log_sum_exp(one), -700);
}

TEST(Sample, RefusesRowsThatAreNoDistribution) {
  const float nan = std::nanf("");
  for (const SamplingParams& params : {SamplingParams{}, SamplingParams{.temperature = 1}}) {
    for (const std::vector<float>& logits :
         {std::vector<float>{1, 2, nan}, std::vector<float>{nan, 2},
          std::vector<float>{1, kInfinity}, std::vector<float>{-kInfinity, -kInfinity}}) {
      EXPECT_THROW(sample(logits, params, {}, {}, 0), Error);
    }
  }
}

TEST(Validate, NamesTheParameterAndItsRange) {
  const double nan = std::nan("");
  const std::vector<std::pair<SamplingParams, const char*>> cases = {
      {{.temperature = -0.1}, "temperature: expected at least 0, got -0.1"},
      {{.temperature = nan}, "temperature"},
      {{.temperature = std::numeric_limits<double>::infinity()}, "temperature"},
      {{.top_k = -1}, "top_k"},
      {{.top_p = 0}, "top_p: expected above 0, at most 1, got 0"},
      {{.top_p = 1.01}, "top_p"},
      {{.top_p = nan}, "top_p"},
      {{.min_p = -0.1}, "min_p"},
      {{.min_p = 1.1}, "min_p"},
      {{.repetition_penalty = 0}, "repetition_penalty"},
      {{.presence_penalty = 2.1}, "presence_penalty"},
      {{.frequency_penalty = nan}, "frequency_penalty"},
      {{.logprobs = -2}, "logprobs"},
  };
  for (const auto& [params, message] : cases) {
    EXPECT_THAT([&] { validate(params); }, ThrowsMessage<Error>(HasSubstr(message)));
  }
  EXPECT_NO_THROW(validate({}));
}

}  // namespace
}  // namespace replayssm
