// A model cut into ranks, which run side by side in this process, is the whole model.
#include "model/sharding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <thread>

#include "core/check.h"
#include "engine/rows_fixture.h"

namespace replayssm::testing {
namespace {

// Sums in the order of the ranks.
class Group {
 public:
  explicit Group(int64_t world) : barrier_(world), parts_(world) {}

  int64_t world() const { return std::ssize(parts_); }
  void all_reduce(int64_t rank, float* data, int64_t count) {
    parts_[rank] = data;
    barrier_.arrive_and_wait();
    std::vector<float> sum(count);
    for (const float* part : parts_)
      for (int64_t i = 0; i < count; ++i) sum[i] += part[i];
    barrier_.arrive_and_wait();
    std::ranges::copy(sum, data);
    ++sums_;
  }
  int64_t sums() const { return sums_; }

 private:
  std::barrier<> barrier_;
  std::vector<const float*> parts_;
  std::atomic<int64_t> sums_ = 0;
};

class Member final : public Communicator {
 public:
  Member(Group& group, int64_t rank) : group_(group), rank_(rank) {}
  Shard shard() const override { return {rank_, group_.world()}; }
  void all_reduce(float* data, int64_t count, void* /*stream*/) override {
    group_.all_reduce(rank_, data, count);
  }

 private:
  Group& group_;
  int64_t rank_;
};

struct Result {
  std::vector<float> logits;
  int64_t weight_bytes = 0, state_bytes = 0;
};

// The logits of two prompts and of some steps behind them.
Result run(const ModelSource& source) {
  ThreadPool pool(1);
  const auto model = load_cpu_model(source, DType::kFloat32, pool);
  Rows rows(*model, {.buffer_len = 3, .rows = 2, .context = 64, .max_logits = 10});
  const std::vector<int32_t> prompt{5, 200, 33, 7, 8, 9, 120}, other{64, 3, 51};
  Result result{
      .logits = {}, .weight_bytes = model->weight_bytes(), .state_bytes = rows.state_bytes()};
  const auto add = [&](std::span<const float> logits) {
    result.logits.insert(result.logits.end(), logits.begin(), logits.end());
  };
  add(rows.prefill(std::vector<RowTokens>{{0, prompt}, {1, other}}, std::vector{0, 6, 9}));
  for (int32_t step = 0; step < 8; ++step) add(rows.decode(std::vector{step + 20, step + 90}));
  return result;
}

// A model in one piece is its only rank, draft head and all.
TEST(SingleRank, IsTheWholeModel) {
  const auto folder = repository() / "models/tiny-qwen3.5";
  SingleRank rank;
  const Result whole = run({.folder = folder, .draft_head = true});
  const Result only = run({.folder = folder, .draft_head = true, .communicator = &rank});
  EXPECT_EQ(only.logits, whole.logits);
  EXPECT_EQ(only.weight_bytes, whole.weight_bytes);
}

class Sharding : public ::testing::TestWithParam<std::tuple<const char*, int64_t>> {};

INSTANTIATE_TEST_SUITE_P(
    Models, Sharding,
    ::testing::Combine(::testing::Values("models/tiny-nemotron-h", "models/tiny-qwen3.5",
                                         "tests/golden/random/falcon_h1",
                                         "tests/golden/random/kimi_linear",
                                         "tests/golden/random/nemotron_h_moe",
                                         "tests/golden/random/nemotron_h_latent_moe_headdim80",
                                         "tests/golden/random/qwen3_5_moe_text"),
                       ::testing::Values(2, 4)));

TEST_P(Sharding, RanksTogetherAreTheWholeModel) {
  const auto& [name, world] = GetParam();
  const auto folder = repository() / name;
  if (const std::string reason = shard_obstacle(load_config(folder), world); !reason.empty())
    GTEST_SKIP() << reason;
  const Result whole = run({.folder = folder});
  Group group(world);
  std::vector<Result> results(world);
  {
    std::vector<std::jthread> ranks;
    for (int64_t rank = 0; rank < world; ++rank) {
      ranks.emplace_back([&, rank] {
        Member member(group, rank);
        results[rank] = run({.folder = folder, .communicator = &member});
      });
    }
  }
  EXPECT_GT(group.sums(), 0);
  double scale = 0;
  for (const float logit : whole.logits) scale += logit * logit;
  scale = std::sqrt(scale / static_cast<double>(whole.logits.size()));
  int64_t states = 0;
  for (const Result& result : results) {
    ASSERT_EQ(result.logits.size(), whole.logits.size());
    for (size_t i = 0; i < whole.logits.size(); ++i)
      ASSERT_NEAR(result.logits[i], whole.logits[i], 1e-4 * scale) << "at " << i;
    EXPECT_LT(result.weight_bytes, whole.weight_bytes);
    states += result.state_bytes;
  }
  // Keys of groups that ranks share are kept by each of them.
  EXPECT_GE(states, whole.state_bytes);
  EXPECT_LT(states, whole.state_bytes * 3 / 2);
}

TEST(ShardObstacle, NamesWhatCannotBeCut) {
  const ModelConfig config = load_config(repository() / "models/tiny-qwen3.5");
  EXPECT_EQ(shard_obstacle(config, 1), "");
  EXPECT_NE(shard_obstacle(config, 3).find("cannot be cut into 3"), std::string::npos);
  ModelConfig changed = config;
  ModelWeights weights;
  EXPECT_THROW(take_shard(changed, weights, {.rank = 0, .world = 3}), Error);
}

}  // namespace
}  // namespace replayssm::testing
