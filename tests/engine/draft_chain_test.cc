// Drafts of a head that are made behind the host are those made one by one, on every device.
#include <gtest/gtest.h>

#include <limits>

#include "engine/pass_builder.h"
#include "engine/rows_fixture.h"
#include "engine/state_view.h"

namespace replayssm::testing {
namespace {

constexpr int64_t kPrompt = 20, kDeepest = 6;
using Drafts = std::vector<std::vector<int32_t>>;

class DraftChain : public ::testing::TestWithParam<ModelAndDevice> {
 protected:
  void SetUp() override {
    const auto folder = repository() / "models" / std::get<0>(GetParam());
    const Device& device = std::get<1>(GetParam());
    if (const std::string reason = obstacle(folder, device); !reason.empty())
      GTEST_SKIP() << reason;
    model_ = load_model({.folder = folder, .draft_head = true}, DType::kFloat32, device, pool_);
  }

  ThreadPool pool_{1};
  std::unique_ptr<Model> model_;
};

INSTANTIATE_TEST_SUITE_P(Models, DraftChain,
                         ::testing::Combine(::testing::Values("tiny-qwen3.5"),
                                            ::testing::Values("cpu", "cuda")),
                         test_name);

// Sequences of some tokens each, whose drafts are of different depths.
class Sequences {
 public:
  Sequences(Model& model, const std::vector<int64_t>& depths)
      : model_(model),
        depths_(depths),
        slots_(model.config(), {.conv_kernel = static_cast<int32_t>(model.config().conv_kernel)},
               DType::kFloat32, DType::kFloat32, static_cast<int32_t>(depths.size()), {},
               model.memory()),
        kv_(model.config(), DType::kFloat32, std::ssize(depths), model.memory()),
        tables_(depths.size()) {
    for (auto& table : tables_) {
      slots_.acquire();
      kv_.grow(table, kPrompt + kDeepest);
    }
    for (size_t s = 0; s < depths.size(); ++s) prompt(s);
    Batch batch = pass_.batch(0);
    batch.keep_hidden = KeepHidden::kAfterNorm;
    model_.forward(batch, state(), {});
  }

  // Of passes that the next one follows unseen, or not. The sequence `broken` has keys that are no
  // numbers from its second pass on; -1: none has.
  Drafts draft(bool chained, int64_t broken) {
    std::vector<std::vector<int32_t>> tokens;  // of every pass
    std::vector<std::vector<size_t>> open;     // whose they are
    tokens.reserve(kDeepest);
    for (int64_t depth = 0; depth < kDeepest; ++depth) {
      const auto rows = build(depth, chained, tokens, open);
      if (open.back().empty()) break;
      tokens.emplace_back(open.back().size(), -1);
      model_.draft({.batch = pass_.batch(depth == 0 ? 0 : pass_.sequences()),
                    .hidden_row = rows,
                    .recycled = depth > 0},
                   state(), {.tokens = tokens.back().data()});
      if (!chained) model_.finish();
      if (depth == 0 && broken >= 0) break_keys(static_cast<size_t>(broken));
    }
    for (size_t pass = 0; chained && pass < tokens.size(); ++pass) model_.finish();
    Drafts drafts(depths_.size());
    for (size_t pass = 0; pass < tokens.size(); ++pass) {
      for (size_t row = 0; row < open[pass].size(); ++row) {
        auto& draft = drafts[open[pass][row]];
        if (tokens[pass][row] >= 0 && draft.size() == pass) draft.push_back(tokens[pass][row]);
      }
    }
    return drafts;
  }

 private:
  StateView state() const { return state_view(Route::kOutputOnly, slots_, kv_); }

  int32_t token(size_t sequence, int64_t position) const {
    return static_cast<int32_t>((101 * static_cast<int64_t>(sequence) + 37 * position) %
                                model_.config().vocab_size);
  }
  int64_t length(size_t sequence) const { return kPrompt - static_cast<int64_t>(sequence); }

  // The prompt, or with `ahead` = 1 what follows its tokens.
  void prompt(size_t s, int64_t ahead = 0) {
    pass_.add(static_cast<int32_t>(s), 0, tables_[s]);
    for (int64_t i = 0; i < length(s); ++i)
      pass_.push(token(s, i + ahead), static_cast<int32_t>(i) - 1);
  }

  // The pass of a depth; returns the rows that its hidden states are.
  std::vector<int32_t> build(int64_t depth, bool chained,
                             const std::vector<std::vector<int32_t>>& tokens,
                             std::vector<std::vector<size_t>>& open) {
    pass_.clear();
    std::vector<int32_t> rows;
    std::vector<size_t> deeper;
    for (size_t s = 0; depth == 0 && s < depths_.size(); ++s) {
      prompt(s, 1);
      while (std::ssize(rows) < pass_.tokens()) rows.push_back(static_cast<int32_t>(rows.size()));
      if (depths_[s] == 0) continue;
      pass_.want_logits();
      deeper.push_back(s);
    }
    for (size_t row = 0; depth > 0 && row < open.back().size(); ++row) {
      const size_t s = open.back()[row];
      const int32_t before = tokens.back()[row];
      if (depths_[s] <= depth || (!chained && before < 0)) continue;
      pass_.add(static_cast<int32_t>(s), length(s) + depth - 1, tables_[s]);
      pass_.push(chained ? -2 - static_cast<int32_t>(row) : before, -1);
      pass_.want_logits();
      rows.push_back(static_cast<int32_t>(row));
      deeper.push_back(s);
    }
    open.push_back(std::move(deeper));
    return rows;
  }

  void break_keys(size_t sequence) {
    const std::vector<float> none(static_cast<size_t>(kv_shape(model_.config()).head_dim),
                                  std::numeric_limits<float>::quiet_NaN());
    const KvShape shape = kv_shape(model_.config());
    auto* keys = static_cast<float*>(kv_.keys().back()) +
                 tables_[sequence].front() * shape.heads * KvPool::kBlockSize * shape.head_dim;
    model_.memory().write(keys, none.data(), std::ssize(none) * int64_t{sizeof(float)});
  }

  Model& model_;
  std::vector<int64_t> depths_;
  SlotPool slots_;
  KvPool kv_;
  std::vector<std::vector<int32_t>> tables_;
  PassBuilder pass_;
};

TEST_P(DraftChain, IsTheDraftsMadeOneByOne) {
  const std::vector<int64_t> depths = {3, 0, kDeepest, 1, 5, 5, 2};
  Sequences sequences(*model_, depths);
  for (int repeat = 0; repeat < 3; ++repeat) {  // the third time from captured passes
    const Drafts chained = sequences.draft(true, -1);
    EXPECT_EQ(chained, sequences.draft(false, -1));
    for (size_t s = 0; s < depths.size(); ++s) EXPECT_EQ(std::ssize(chained[s]), depths[s]);
  }
}

// What a chain goes on with behind a row without a token touches no other draft.
TEST_P(DraftChain, ARowThatTellsNoTokenEndsItsOwnDraftAlone) {
  const std::vector<int64_t> depths = {3, 5, kDeepest, 1, 5, 2};
  Sequences sequences(*model_, depths);
  const Drafts whole = sequences.draft(false, -1);
  for (const int64_t broken : {1, 2, 4}) {
    const Drafts chained = sequences.draft(true, broken);
    EXPECT_EQ(chained, sequences.draft(false, broken)) << broken;
    for (size_t s = 0; s < depths.size(); ++s) {
      if (static_cast<int64_t>(s) == broken) continue;
      EXPECT_EQ(chained[s], whole[s]) << broken;
    }
    EXPECT_EQ(chained[static_cast<size_t>(broken)].size(), 1U);
  }
}

}  // namespace
}  // namespace replayssm::testing
