// Whole models with drafts, on every device: windows that are kept in part are as if the rest had
// never been, and greedy text is that of plain decoding.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>

#include "core/philox.h"
#include "engine/engine.h"
#include "engine/pass_builder.h"
#include "engine/rows_fixture.h"
#include "engine/state_view.h"
#include "model/tokenizer.h"

namespace replayssm::testing {
namespace {

constexpr double kLogitTolerance = 2e-3;   // of the logits' root mean square: rounding in fp32
constexpr double kMarginTolerance = 2e-3;  // of logits that decide: nats

class DraftedModel : public ::testing::TestWithParam<ModelAndDevice> {
 protected:
  void SetUp() override {
    folder_ = repository() / "models" / std::get<0>(GetParam());
    const Device& device = std::get<1>(GetParam());
    if (const std::string reason = obstacle(folder_, device); !reason.empty())
      GTEST_SKIP() << reason;
    model_ = load_model({.folder = folder_, .draft_head = true}, DType::kFloat32, device, pool_);
  }

  // So many tokens of the text from a character on.
  std::vector<int32_t> text(int64_t first, int64_t count) const {
    constexpr int64_t kMostCharacters = 8;  // of a token, on average
    static const std::string whole = read_text(repository() / "models/eval.txt");
    const std::vector<int32_t> ids = Tokenizer(folder_).encode(
        whole.substr(static_cast<size_t>(first), static_cast<size_t>(kMostCharacters * count)));
    if (std::ssize(ids) < count) throw std::out_of_range("too few tokens");
    return {ids.begin(), ids.begin() + count};
  }

  std::filesystem::path folder_;
  ThreadPool pool_{1};
  std::unique_ptr<Model> model_;
};

INSTANTIATE_TEST_SUITE_P(Models, DraftedModel,
                         ::testing::Combine(::testing::Values("tiny-nemotron-h", "tiny-qwen3.5"),
                                            ::testing::Values("cpu", "cuda")),
                         test_name);

// Sequences of the same text, whose windows hold its next tokens among strangers, as chains or as
// trees, and of whose right tokens any number, none included, is kept.
class Windows {
 public:
  static constexpr int64_t kSequences = 3, kMostWindow = 7;

  Windows(Model& model, Route route, int32_t buffer_len, std::span<const int32_t> text, bool trees)
      : model_(model),
        ring_{.buffer_len = buffer_len,
              .max_window = kMostWindow,
              .conv_kernel = static_cast<int32_t>(model.config().conv_kernel)},
        route_(route),
        text_(text),
        trees_(trees),
        slots_(model.config(), ring_, DType::kFloat32, DType::kFloat32, kSequences, {},
               model.memory()),
        kv_(model.config(), DType::kFloat32, kSequences * KvPool::blocks_for(2 * std::ssize(text)),
            model.memory()),
        tables_(kSequences) {
    for (auto& table : tables_) {
      slots_.acquire();
      kv_.grow(table, std::ssize(text) + kMostWindow);
    }
  }

  // Runs all to the end of the text; returns the worst error of the right tokens' logits.
  double run(std::span<const float> expected) {
    prefill();
    double worst = 0;
    for (int round = 0; done_[0] + kMostWindow < std::ssize(text_); ++round)
      worst = std::max(worst, step(expected));
    return worst;
  }

 private:
  int64_t random(int64_t most) {  // below it
    return static_cast<int64_t>(uniform(11, drawn_++) * static_cast<double>(most));
  }

  StateView state() const { return state_view(route_, slots_, kv_); }

  void prefill() {
    pass_.clear();
    for (int32_t s = 0; s < kSequences; ++s) {
      done_[s] = 5 + s;
      pass_.add(s, 0, tables_[s]);
      for (int64_t i = 0; i < done_[s]; ++i) pass_.push(text_[i], static_cast<int32_t>(i) - 1);
    }
    model_.forward(pass_.batch(0), state(), {});
  }

  double step(std::span<const float> expected) {
    pass_.clear();
    std::vector<std::vector<int32_t>> right(kSequences);  // rows of the text's tokens
    for (int32_t s = 0; s < kSequences; ++s) {
      pass_.add(s, done_[s], tables_[s]);
      // Nothing at all is legal too.
      const int64_t window =
          std::min<int64_t>(random(kMostWindow + 1), std::ssize(text_) - done_[s]);
      int32_t tail = -1;
      for (int32_t row = 0; row < window; ++row) {
        const bool stranger = trees_ && random(3) == 0;
        pass_.push(
            stranger ? static_cast<int32_t>(random(4000)) : text_[done_[s] + std::ssize(right[s])],
            stranger && row > 0 ? static_cast<int32_t>(random(row)) : tail);
        pass_.want_logits();
        if (stranger) continue;
        tail = row;
        right[s].push_back(row);
      }
    }
    Batch batch = pass_.batch(kSequences);
    batch.deferred = true;
    const int64_t vocab = model_.config().vocab_size;
    std::vector<float> logits(static_cast<size_t>(pass_.logits() * vocab));
    if (pass_.tokens() > 0) model_.forward(batch, state(), {.logits = logits.data()});
    std::vector<int32_t> accepted, path;
    double worst = 0;
    for (int32_t s = 0; s < kSequences; ++s) {
      for (size_t i = 0; i < right[s].size(); ++i) {
        const float* row = logits.data() + (batch.query_start[s] + right[s][i]) * vocab;
        const float* target = expected.data() + (done_[s] + static_cast<int64_t>(i)) * vocab;
        double square = 0, difference = 0;
        for (int64_t v = 0; v < vocab; ++v) {
          square += double{target[v]} * target[v];
          const double error = std::abs(double{row[v]} - target[v]);
          difference = std::isnan(error) ? std::numeric_limits<double>::infinity()
                                         : std::max(difference, error);
        }
        worst = std::max(worst, difference / std::sqrt(square / static_cast<double>(vocab)));
      }
      const int64_t kept = random(std::ssize(right[s]) + 1);
      accepted.push_back(static_cast<int32_t>(kept));
      path.insert(path.end(), right[s].begin(), right[s].begin() + kept);
      path.resize(static_cast<size_t>(batch.query_start[s + 1]));
      done_[s] += kept;
    }
    WindowCommit commit{.accepted = accepted};
    if (trees_) commit.path = path;
    if (pass_.tokens() > 0) model_.commit(batch, commit, state());
    return worst;
  }

  Model& model_;
  RingConfig ring_;
  Route route_;
  std::span<const int32_t> text_;
  bool trees_;
  SlotPool slots_;
  KvPool kv_;
  std::vector<std::vector<int32_t>> tables_;
  int64_t done_[kSequences] = {};
  PassBuilder pass_;
  int64_t drawn_ = 0;
};

TEST_P(DraftedModel, RejectedTokensLeaveNoTrace) {
  const std::vector<int32_t> ids = text(0, 60);
  const std::vector<float> expected = prompt_logits(*model_, ids);
  for (const bool trees : {false, true}) {
    for (const Route route : {Route::kOutputOnly, Route::kStateAndOutput}) {
      for (const int32_t buffer_len : {1, 6, 16}) {
        Windows windows(*model_, route, buffer_len, ids, trees);
        EXPECT_LT(windows.run(expected), kLogitTolerance)
            << route_name(route) << " buffer " << buffer_len << (trees ? " trees" : "");
      }
    }
  }
}

struct Text {
  std::vector<int32_t> ids;
  std::vector<double> margin;  // by which the token was likelier than the next one
};
using Texts = std::map<int64_t, Text>;

Texts run(Model& model, const std::vector<Request>& requests, const EngineOptions& options,
          SpeculationStats* stats = nullptr) {
  Engine engine(model, nullptr, options);
  for (const Request& request : requests) engine.add(request);
  Texts texts;
  while (!engine.idle()) {
    for (const RequestOutput& output : engine.step()) {
      Text& text = texts[output.request];
      text.ids.push_back(output.token.id);
      const auto& top = output.token.top_logprobs;
      if (top.size() == 2) text.margin.push_back(top[0].second - top[1].second);
    }
  }
  if (stats) *stats = engine.stats().speculation;
  return texts;
}

// Of texts that differ from a token on where the decision was no closer than arithmetic.
void expect_same(const Texts& plain, const Texts& drafted, int64_t& ties) {
  ASSERT_EQ(plain.size(), drafted.size());
  for (const auto& [id, text] : plain) {
    const auto& ids = drafted.at(id).ids;
    ASSERT_EQ(ids.size(), text.ids.size());
    const auto at = std::ranges::mismatch(text.ids, ids).in1 - text.ids.begin();
    if (at == std::ssize(ids)) continue;
    EXPECT_LT(text.margin[at], kMarginTolerance) << "request " << id << " token " << at;
    ++ties;
  }
}

SpeculativeConfig drafts(DraftMethod method, int64_t tokens, int64_t width = 1) {
  return {.method = method, .tokens = tokens, .tree_width = width, .adaptive = false};
}

void compare_greedy(Model& model, const std::vector<Request>& requests, int64_t sequences) {
  EngineOptions options{.max_num_seqs = sequences, .max_num_batched_tokens = 512};
  options.max_model_len = 2048;
  std::vector<Request> with_margins = requests;
  for (Request& request : with_margins) request.sampling.logprobs = 2;
  const Texts plain = run(model, with_margins, options);
  std::vector<std::pair<SpeculativeConfig, Route>> cases = {
      {drafts(DraftMethod::kNgram, 4), Route::kOutputOnly},
      {drafts(DraftMethod::kSuffix, 7), Route::kStateAndOutput},
      {drafts(DraftMethod::kNgram, 3, 3), Route::kOutputOnly},
      {drafts(DraftMethod::kNgram, std::min<int64_t>(19, model.longest_window() - 1)),
       Route::kOutputOnly}};
  if (model.has_draft_head()) {
    cases.push_back({drafts(DraftMethod::kMtp, 4), Route::kOutputOnly});
    cases.push_back({drafts(DraftMethod::kMtp, 2, 3), Route::kOutputOnly});
  }
  cases.push_back({drafts(DraftMethod::kNgram, 4), Route::kConventional});
  cases.back().first.snapshots = true;
  int64_t ties = 0;
  for (const auto& [config, route] : cases) {
    options.route = route;
    options.speculative = config;
    SpeculationStats stats;
    const Texts drafted = run(model, requests, options, &stats);
    SCOPED_TRACE(std::string(method_name(config.method)) + " x " +
                 std::to_string(config.tree_width));
    expect_same(plain, drafted, ties);
    EXPECT_GT(stats.mean_length(), 1);
  }
  ::testing::Test::RecordProperty("near_ties", static_cast<int>(ties));
}

std::vector<Request> requests_of(const std::function<std::vector<int32_t>(int64_t)>& prompt,
                                 int64_t count, int64_t tokens) {
  std::vector<Request> requests;
  for (int64_t i = 0; i < count; ++i) {
    Request request;
    request.prompt = prompt(i);
    request.max_tokens = tokens;
    request.ignore_eos = true;
    requests.push_back(std::move(request));
  }
  return requests;
}

TEST_P(DraftedModel, GreedyTextIsThatOfPlainDecoding) {
  const auto prompt = [&](int64_t i) { return text(3000 * i, 40 + 30 * i); };
  compare_greedy(*model_, requests_of(prompt, 3, 40), 2);
}

// The same over a hundred thousand tokens of each model and way of drafting: minutes.
TEST_P(DraftedModel, DISABLED_GreedyTextOfAHundredThousandTokens) {
  const auto prompt = [&](int64_t i) { return text(1900 * i, 100); };
  compare_greedy(*model_, requests_of(prompt, 100, 1000), 16);
}

}  // namespace
}  // namespace replayssm::testing
