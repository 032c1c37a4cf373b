// A Nemotron-3 Super draft head against its record, and under the engine.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "engine/engine.h"
#include "engine/pass_builder.h"
#include "engine/rows_fixture.h"
#include "engine/state_view.h"

namespace replayssm::testing {
namespace {

constexpr double kLogitTolerance = 2e-3;  // of the logits' root mean square: rounding in fp32

class DraftHead : public ::testing::Test {
 protected:
  DraftHead()
      : model_(load_cpu_model({.folder = folder_, .draft_head = true}, DType::kFloat32, pool_)) {}

  void expect_rows(const json& record, std::span<const float> logits) {
    const int64_t vocab = model_->config().vocab_size;
    ASSERT_EQ(std::ssize(record) * vocab, std::ssize(logits));
    const double square = std::inner_product(logits.begin(), logits.end(), logits.begin(), 0.0);
    const double scale = std::sqrt(square / static_cast<double>(logits.size()));
    for (size_t i = 0; i < logits.size(); ++i) {
      ASSERT_NEAR(logits[i], record[i / vocab][i % vocab].get<double>(), kLogitTolerance * scale)
          << "row " << i / vocab << " id " << i % vocab;
    }
  }

  std::filesystem::path folder_ = repository() / "tests/golden/random/nemotron_h_mtp";
  ThreadPool pool_{1};
  std::unique_ptr<Model> model_;
};

TEST_F(DraftHead, LogitsMatchTheRecord) {
  ASSERT_TRUE(model_->has_draft_head());
  const json record = read_json(folder_ / "golden.json");
  const auto ids = record["ids"].get<std::vector<int32_t>>();
  const auto length = std::ssize(ids), vocab = model_->config().vocab_size;
  const RingConfig ring{.conv_kernel = static_cast<int32_t>(model_->config().conv_kernel)};
  SlotPool slots(model_->config(), ring, DType::kFloat32, DType::kFloat32, 1, {}, model_->memory());
  KvPool kv(model_->config(), DType::kFloat32, 4, model_->memory());
  std::vector<int32_t> blocks;
  ASSERT_TRUE(kv.grow(blocks, length + 8));
  const StateView state = state_view(Route::kOutputOnly, slots, kv);
  PassBuilder pass;
  pass.add(slots.acquire(), 0, blocks);
  for (int32_t i = 0; i < length; ++i) pass.push(ids[i], i - 1);
  Batch batch = pass.batch(0);
  batch.keep_hidden = KeepHidden::kAfterNorm;
  model_->forward(batch, state, {});

  // Every position with the token behind it.
  const auto wanted = std::ssize(record["head_logits"]);
  std::vector<float> logits(wanted * vocab);
  std::vector<int32_t> rows(length);
  std::iota(rows.begin(), rows.end(), 0);
  pass.clear();
  pass.add(0, 0, blocks);
  for (int32_t i = 0; i < length; ++i) {
    pass.push(i + 1 < length ? ids[i + 1] : record["head_next_id"].get<int32_t>(), i - 1);
    if (i >= length - wanted) pass.want_logits();
  }
  model_->draft({.batch = pass.batch(0), .hidden_row = rows}, state, {.logits = logits.data()});
  expect_rows(record["head_logits"], logits);

  // Drafts of drafts: the head reads its own output.
  const auto drafts = record["drafts"].get<std::vector<int32_t>>();
  std::vector<float> chain(logits.end() - vocab, logits.end());
  rows = {static_cast<int32_t>(wanted) - 1};
  for (size_t i = 0; i + 1 < drafts.size(); ++i) {
    pass.clear();
    pass.add(0, length + static_cast<int64_t>(i), blocks);
    pass.push(drafts[i], -1);
    pass.want_logits();
    chain.resize(chain.size() + vocab);
    model_->draft({.batch = pass.batch(1), .hidden_row = rows, .recycled = true}, state,
                  {.logits = chain.data() + chain.size() - vocab});
    rows = {0};
  }
  expect_rows(record["draft_logits"], chain);
}

// The first draft behind the record's prompt is the record's; whatever is drafted, the text is that
// of plain decoding.
TEST_F(DraftHead, GreedyTextIsThatOfPlainDecoding) {
  const json record = read_json(folder_ / "golden.json");
  const auto prompt = record["ids"].get<std::vector<int32_t>>();
  const auto run = [&](std::optional<SpeculativeConfig> config, SpeculationStats* stats) {
    EngineOptions options{.ring = {.buffer_len = 5}, .max_num_seqs = 2};
    options.speculative = config;
    Engine engine(*model_, nullptr, options);
    std::map<int64_t, std::vector<int32_t>> texts;
    for (size_t length = 1; length <= prompt.size(); length += 13) {
      Request request;
      request.prompt.assign(prompt.begin(), prompt.begin() + static_cast<int64_t>(length));
      request.max_tokens = 60;
      request.ignore_eos = true;
      engine.add(std::move(request));
    }
    while (!engine.idle()) {
      for (const auto& output : engine.step()) texts[output.request].push_back(output.token.id);
    }
    if (stats) *stats = engine.stats().speculation;
    return texts;
  };
  const auto plain = run({}, nullptr);
  const auto greedy = record["greedy_ids"].get<std::vector<int32_t>>();
  EXPECT_TRUE(std::ranges::equal(std::span(plain.at(3)).first(greedy.size()), greedy));
  for (const int64_t width : {1, 3}) {
    SpeculationStats stats;
    EXPECT_EQ(
        run(
            SpeculativeConfig{
                .method = DraftMethod::kMtp, .tokens = 3, .tree_width = width, .adaptive = false},
            &stats),
        plain);
    EXPECT_GT(stats.drafted_tokens, 400 * width);
  }
}

}  // namespace
}  // namespace replayssm::testing
