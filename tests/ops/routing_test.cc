#include <gmock/gmock.h>

#include "ops/cpu/dense.h"
#include "ops/dense_test_util.h"
#include "replayssm/error.h"

namespace replayssm::cpu {
namespace {

using testing::ElementsAre;

class Routing : public PerTarget {};

INSTANTIATE_TEST_SUITE_P(Targets, Routing, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         target_name);

struct Choice {
  std::vector<int32_t> expert;
  std::vector<float> weight;
};

Choice route(RouterParams p, const std::vector<float>& logits, const std::vector<float>& bias,
             int threads = 1) {
  ThreadPool pool(threads);
  p.logits = logits.data();
  p.correction_bias = bias.empty() ? nullptr : bias.data();
  p.rows = static_cast<int64_t>(logits.size()) / p.experts;
  Choice choice{std::vector<int32_t>(static_cast<size_t>(p.rows * p.top_k)),
                std::vector<float>(static_cast<size_t>(p.rows * p.top_k))};
  p.expert = choice.expert.data();
  p.weight = choice.weight.data();
  route_experts(p, pool);
  return choice;
}

TEST_P(Routing, EqualsTheReference) {
  RouterParams cases[6];
  cases[0] = {.experts = 128, .top_k = 6, .sigmoid = true, .scale = 2.5f};
  cases[1] = {.experts = 512, .top_k = 10};
  cases[2] = {.experts = 64, .top_k = 8, .groups = 8, .top_groups = 3, .sigmoid = true};
  cases[3] = {.experts = 7, .top_k = 7, .renormalize = false, .scale = 3};
  cases[4] = {.experts = 6, .top_k = 2, .groups = 6, .top_groups = 4};
  cases[5] = {.experts = 1, .top_k = 1, .sigmoid = true};
  for (const auto& p : cases)
    for (const bool with_bias : {false, true}) {
      const int64_t rows = 75;
      const auto logits = random_values(rows * p.experts, 1, 2);
      const auto bias = random_values(with_bias ? p.experts : 0, 2, 0.3f);
      const auto choice = route(p, logits, bias);
      for (const int threads : {2, 3}) {
        const auto again = route(p, logits, bias, threads);
        EXPECT_EQ(choice.expert, again.expert);
        EXPECT_TRUE(same_bits(choice.weight, again.weight));
      }
      const reference::RouterShape shape{p.experts, p.top_k,       p.groups,       p.top_groups,
                                         p.sigmoid, p.renormalize, double{p.scale}};
      for (int64_t r = 0; r < rows; ++r) {
        const std::vector<float> row(&logits[static_cast<size_t>(r * p.experts)],
                                     &logits[static_cast<size_t>(r * p.experts)] + p.experts);
        const auto want = reference::route_experts(shape, to_double(row), to_double(bias));
        const auto first = static_cast<size_t>(r * p.top_k);
        std::vector<int32_t> expert(&choice.expert[first], &choice.expert[first] + p.top_k);
        std::vector<float> weight(&choice.weight[first], &choice.weight[first] + p.top_k);
        ASSERT_EQ(expert, want.expert);
        // Scores within 10 roundings and, for a softmax, those of a sum over the experts.
        expect_close(weight, want.weight, 30 + static_cast<double>(p.experts + p.top_k));
      }
    }
}

TEST_P(Routing, TiesGoToTheLowerIndex) {
  const RouterParams p{.experts = 6, .top_k = 3};
  EXPECT_THAT(route(p, {1, 2, 1, 2, 1, 1}, {}).expert, ElementsAre(1, 3, 0));
  const RouterParams grouped{.experts = 6, .top_k = 2, .groups = 3, .top_groups = 1};
  EXPECT_THAT(route(grouped, {1, 1, 1, 1, 1, 1}, {}).expert, ElementsAre(0, 1));
}

TEST_P(Routing, TheBiasSelectsButDoesNotWeigh) {
  const RouterParams p{.experts = 4, .top_k = 1, .sigmoid = true, .renormalize = false};
  const auto choice = route(p, {0, 3, 0, 0}, {0, 0, 5, 0});
  EXPECT_THAT(choice.expert, ElementsAre(2));
  EXPECT_EQ(choice.weight[0], 0.5f);
}

TEST_P(Routing, GroupsOutOfTheRaceNeverWinWithNegativeChoices) {
  // All biased scores are negative: an expert of a dropped group must not win by counting as zero.
  const RouterParams p{.experts = 4, .top_k = 2, .groups = 2, .top_groups = 1, .sigmoid = true};
  EXPECT_THAT(route(p, {0, 0, 1, 1}, {-5, -5, -5, -5}).expert, ElementsAre(2, 3));
}

TEST_P(Routing, ExtremeLogitsStayFinite) {
  const RouterParams p{.experts = 4, .top_k = 2};
  const auto choice = route(p, {1e30f, -1e30f, 1e30f, 3}, {});
  EXPECT_THAT(choice.expert, ElementsAre(0, 2));
  EXPECT_THAT(choice.weight, ElementsAre(0.5f, 0.5f));
  const RouterParams sigmoid{.experts = 3, .top_k = 2, .sigmoid = true};
  EXPECT_THAT(route(sigmoid, {-1e30f, -1e30f, -1e30f}, {}).weight, ElementsAre(0.0f, 0.0f));
}

TEST_P(Routing, NanLosesTheSelection) {
  const RouterParams p{.experts = 4, .top_k = 2, .sigmoid = true};
  EXPECT_THAT(route(p, {kNan, 1, kNan, 2}, {}).expert, ElementsAre(3, 1));
}

TEST(RoutingContracts, ImpossibleShapesAreRefused) {
  const std::vector<float> logits(8);
  EXPECT_THROW(route({.experts = 8, .top_k = 9}, logits, {}), Error);
  EXPECT_THROW(route({.experts = 8, .top_k = 1, .groups = 3}, logits, {}), Error);
  EXPECT_THROW(route({.experts = 8, .top_k = 5, .groups = 4, .top_groups = 2}, logits, {}), Error);
}

}  // namespace
}  // namespace replayssm::cpu
