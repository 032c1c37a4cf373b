// Drafts of a head whose passes give their tokens late.
#include "engine/head_drafter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>

#include "core/check.h"
#include "engine/fake_model.h"
#include "engine/scheduler.h"

namespace replayssm::testing {
namespace {

constexpr int32_t kLate = -12345;  // where a token is yet to come

// A head whose token behind a row is a function of the row's hidden state, which is one of all that
// it has read; a token divisible by `silent_at` is none.
class FakeHead final : public FakeModel {
 public:
  bool has_draft_head() const override { return true; }

  void draft(const HeadBatch& head, const StateView& /*state*/, const PassOutput& output) override {
    ++passes;
    const Batch& batch = head.batch;
    REPLAYSSM_CHECK(head.hidden_row.size() == batch.token_ids.size(), "hidden rows");
    std::vector<uint64_t> hidden;
    for (int64_t s = 0; s < batch.sequences(); ++s) {
      for (int32_t t = batch.query_start[s]; t < batch.query_start[s + 1]; ++t) {
        const int32_t id = batch.token_ids[t];
        const int32_t known = id <= -2 ? given_.at(static_cast<size_t>(-2 - id)) : id;
        const uint64_t before = head.recycled ? hidden_.at(static_cast<size_t>(head.hidden_row[t]))
                                              : static_cast<uint64_t>(head.hidden_row[t]);
        hidden.push_back(
            extend_hash(extend_hash(before, std::max(known, 0)),
                        static_cast<int32_t>(batch.position[s] + t - batch.query_start[s])));
      }
    }
    hidden_.clear();
    given_.clear();
    for (const int32_t at : batch.logit_tokens) {
      hidden_.push_back(hidden[at]);
      const auto token = static_cast<int32_t>(hidden[at] % config().vocab_size);
      given_.push_back(silent_at > 0 && token % silent_at == 0 ? -1 : token);
    }
    if (output.logits) return tell(output.logits);
    std::fill_n(output.tokens, given_.size(), kLate);
    started_.emplace_back(given_, output.tokens);
    most_started = std::max(most_started, std::ssize(started_));
  }

  void finish() override {
    REPLAYSSM_CHECK(!started_.empty(), "no pass");
    std::ranges::copy(started_.front().first, started_.front().second);
    started_.pop_front();
  }

  int64_t unfinished_drafts() const { return std::ssize(started_); }

  int32_t silent_at = 0;
  int64_t passes = 0;
  std::ptrdiff_t most_started = 0;

 private:
  // Logits that leave no choice.
  void tell(float* logits) const {
    for (const int32_t token : given_) {
      std::fill_n(logits, config().vocab_size, token < 0 ? std::nanf("") : -INFINITY);
      if (token >= 0) logits[token] = 0;
      logits += config().vocab_size;
    }
  }

  std::vector<uint64_t> hidden_;  // of the last pass's rows
  std::vector<int32_t> given_;
  std::deque<std::pair<std::vector<int32_t>, int32_t*>> started_;
};

// The drafts of sequences of which a pass has computed some tokens, to these depths.
std::vector<std::vector<int32_t>> drafts(FakeHead& head, const SpeculativeConfig& config,
                                         const std::vector<int64_t>& depths) {
  HeadDrafter drafter(head, config, [] { return StateView{}; });
  std::vector<Sequence> sequences(depths.size());
  std::vector<std::vector<int32_t>> rows(depths.size());
  std::vector<DraftRequest> requests;
  int32_t row = 0;
  for (size_t i = 0; i < depths.size(); ++i) {
    Sequence& sequence = sequences[i];
    sequence.id = static_cast<int64_t>(i);
    sequence.slot = static_cast<int32_t>(i);
    sequence.sampling.temperature = 1;
    sequence.computed = static_cast<int64_t>(3 + i);
    for (int64_t t = 0; t <= sequence.computed; ++t) {
      sequence.tokens.push_back(static_cast<int32_t>(5 * i + static_cast<size_t>(t)));
      if (t < sequence.computed) rows[i].push_back(row++);
    }
    sequence.prompt_len = sequence.size();
    sequence.blocks = {static_cast<int32_t>(i)};
    requests.push_back(
        {.sequence = &sequence, .rows = rows[i], .depth = depths[i], .draft = &sequence.draft});
  }
  drafter.propose(requests);
  EXPECT_EQ(head.unfinished_drafts(), 0);
  std::vector<std::vector<int32_t>> drafts;
  for (const Sequence& sequence : sequences) drafts.push_back(sequence.draft.tokens);
  return drafts;
}

constexpr SpeculativeConfig kGreedy{.method = DraftMethod::kMtp, .tokens = 7};
// Tokens are drawn, from logits that leave no choice: one pass after another.
constexpr SpeculativeConfig kDrawn{.method = DraftMethod::kMtp, .tokens = 7, .sampled = true};

TEST(HeadDrafter, AChainIsTheDraftsMadeOneByOne) {
  const std::vector<int64_t> depths = {3, 0, 7, 1, 5, 5, 2};
  FakeHead chained, single;
  const auto drafted = drafts(chained, kGreedy, depths);
  EXPECT_EQ(drafted, drafts(single, kDrawn, depths));
  for (size_t i = 0; i < depths.size(); ++i) EXPECT_EQ(std::ssize(drafted[i]), depths[i]);
  EXPECT_EQ(chained.passes, 7);
  EXPECT_EQ(chained.most_started, 7);
  EXPECT_EQ(single.most_started, 0);
}

TEST(HeadDrafter, ADraftEndsWhereTheHeadTellsNoToken) {
  const std::vector<int64_t> depths = {7, 6, 7, 0, 5, 7, 7, 1, 7, 7};
  for (const int32_t silent_at : {1, 2, 3, 7}) {
    FakeHead chained, single;
    chained.silent_at = single.silent_at = silent_at;
    const auto drafted = drafts(chained, kGreedy, depths);
    EXPECT_EQ(drafted, drafts(single, kDrawn, depths)) << silent_at;
    EXPECT_TRUE(std::ranges::any_of(drafted, [&](const auto& draft) {
      return std::ssize(draft) < depths[static_cast<size_t>(&draft - drafted.data())];
    })) << silent_at;
    EXPECT_EQ(chained.passes, 7);
  }
}

}  // namespace
}  // namespace replayssm::testing
