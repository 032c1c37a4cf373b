// Drafts change when tokens come, never which.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/check.h"
#include "engine/requests.h"

namespace replayssm {
namespace {

using testing::cancel_any;
using testing::Dice;
using testing::expect_all_returned;
using testing::expected_output;
using testing::extend_hash;
using testing::FakeModel;
using ::testing::HasSubstr;
using testing::logits_of;
using testing::Outputs;
using testing::run;
using ::testing::ThrowsMessage;

// Few words, so that drafts are right now and then.
constexpr int64_t kVocab = 6;

Request request_of(int seed, int64_t prompt_len, int64_t max_tokens, double temperature) {
  Request request;
  for (int64_t i = 0; i < prompt_len; ++i)
    request.prompt.push_back(static_cast<int32_t>((seed + i * i) % kVocab));
  request.max_tokens = max_tokens;
  request.sampling = {.temperature = temperature,
                      .top_k = seed % 2 == 0 ? 4 : 0,
                      .top_p = seed % 3 == 0 ? 0.9 : 1,
                      .repetition_penalty = seed % 5 == 0 ? 1.1 : 1,
                      .presence_penalty = seed % 5 == 1 ? 0.5 : 0,
                      .seed = static_cast<uint64_t>(seed)};
  return request;
}

struct Setting {
  SpeculativeConfig config;
  Route route = Route::kOutputOnly;
  int32_t buffer_len = 16;
  int64_t max_num_seqs = 4;
  int64_t max_num_batched_tokens = 512;
  int64_t kv_blocks = 0;
};

EngineOptions options_of(const Setting& setting) {
  EngineOptions options{.route = setting.route, .ring = {.buffer_len = setting.buffer_len}};
  options.max_num_seqs = setting.max_num_seqs;
  options.max_num_batched_tokens = setting.max_num_batched_tokens;
  options.kv_blocks = setting.kv_blocks;
  options.speculative = setting.config;
  return options;
}

SpeculativeConfig fixed(DraftMethod method, int64_t tokens, int64_t width = 1) {
  return {
      .method = method, .tokens = tokens, .tree_width = width, .lookup_min = 1, .adaptive = false};
}

class Drafted : public ::testing::TestWithParam<Setting> {};

TEST_P(Drafted, TextsAreThoseOfEachRequestAlone) {
  const Setting& setting = GetParam();
  FakeModel model(kVocab), draft_model(kVocab);
  EngineOptions options = options_of(setting);
  options.draft_model = &draft_model;
  Engine engine(model, nullptr, options);
  std::map<int64_t, Request> requests;
  for (int i = 0; i < 9; ++i) {
    const Request request = request_of(i, 1 + 13 * i % 50, 5 + 23 * i % 90, i % 3 * 0.4);
    requests[engine.add(request)] = request;
  }
  const Outputs outputs = run(engine);
  for (const auto& [id, request] : requests)
    EXPECT_EQ(outputs.at(id), expected_output(request, kVocab)) << "request " << id;
  expect_all_returned(engine);
  const SpeculationStats& stats = engine.stats().speculation;
  EXPECT_GT(model.deferred_tokens, 0);
  EXPECT_GT(stats.kept_tokens, stats.windows);
  EXPECT_GT(stats.drafted_tokens + stats.windows, stats.kept_tokens);
  EXPECT_EQ(model.moved_rows > 0, setting.config.tree_width > 1);
}

INSTANTIATE_TEST_SUITE_P(
    Settings, Drafted,
    ::testing::Values(Setting{fixed(DraftMethod::kNgram, 4)},
                      Setting{fixed(DraftMethod::kNgram, 1)},
                      Setting{fixed(DraftMethod::kNgram, 20)},
                      Setting{fixed(DraftMethod::kNgram, 4), Route::kOutputOnly, 1, 1},
                      Setting{fixed(DraftMethod::kNgram, 7), Route::kStateAndOutput, 5, 4, 7, 5},
                      Setting{fixed(DraftMethod::kNgram, 3, 3), Route::kOutputOnly, 4},
                      Setting{fixed(DraftMethod::kNgram, 4, 8), Route::kStateAndOutput, 16, 3, 9,
                              6},
                      Setting{fixed(DraftMethod::kSuffix, 4)},
                      Setting{fixed(DraftMethod::kSuffix, 6, 4), Route::kOutputOnly, 7, 4, 24, 6},
                      Setting{fixed(DraftMethod::kDraftModel, 4)},
                      Setting{fixed(DraftMethod::kDraftModel, 1), Route::kOutputOnly, 3, 2, 9, 5},
                      Setting{SpeculativeConfig{.method = DraftMethod::kNgram, .lookup_min = 1}}));

// Requests come, go and wait again at random, in the middle of windows, with rings of all sizes.
TEST(Speculation, RandomTraffic) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Dice random(seed);
    FakeModel model(kVocab), draft_model(kVocab);
    Setting setting{fixed(static_cast<DraftMethod>(random(0, 2)), random(1, 9))};
    if (setting.config.method == DraftMethod::kMtp) {
      setting.config.method = DraftMethod::kDraftModel;
    } else {
      setting.config.tree_width = random(1, 4);
    }
    setting.config.adaptive = random(0, 1) == 1;
    setting.route = static_cast<Route>(random(1, 2));
    setting.buffer_len = static_cast<int32_t>(random(1, 20));
    setting.max_num_seqs = random(1, 6);
    setting.max_num_batched_tokens = setting.max_num_seqs + random(0, 40);
    setting.kv_blocks = random(4, 10);
    EngineOptions options = options_of(setting);
    options.draft_model = &draft_model;
    options.prefix_cache_bytes = random(0, 1) << 20;
    options.prefix_interval = kPrefillChunk;
    options.swap_bytes = random(0, 1) << 20;
    Engine engine(model, nullptr, options);
    std::map<int64_t, Request> requests;
    Outputs outputs;
    for (int step = 0; step < 100 || !engine.idle(); ++step) {
      if (step < 100 && random(0, 4) == 0) {
        const Request request =
            request_of(step, random(1, 60), random(1, 68), static_cast<double>(random(0, 2)) * 0.4);
        requests[engine.add(request)] = request;
      }
      if (!requests.empty() && random(0, 40) == 0) {
        cancel_any(engine, requests, random);
      }
      for (const auto& output : engine.step()) outputs[output.request].push_back(output.token.id);
    }
    for (const auto& [id, request] : requests)
      ASSERT_EQ(outputs[id], expected_output(request, kVocab))
          << "seed " << seed << " request " << id;
    EXPECT_EQ(engine.kv().free_blocks() + engine.stats().prefixes.nodes, engine.kv().blocks());
  }
}

// Neither what a drafter cannot say nor that drafts are drawn takes anything from a request.
TEST(Speculation, DrawnDraftsLoseNothing) {
  for (const int32_t nan_after : {-1, 0, 3}) {
    FakeModel model(kVocab), draft_model(kVocab);
    draft_model.nan_after = nan_after;
    EngineOptions options = options_of({fixed(DraftMethod::kDraftModel, 4)});
    options.speculative->sampled = true;
    options.draft_model = &draft_model;
    Engine engine(model, nullptr, options);
    for (int i = 0; i < 4; ++i) {
      Request request = request_of(i, 5 + i, 60, 1);
      request.sampling.logprobs = 2;
      engine.add(request);
    }
    std::map<int64_t, int64_t> tokens;
    while (!engine.idle()) {
      for (const RequestOutput& output : engine.step()) {
        ++tokens[output.request];
        EXPECT_EQ(output.token.top_logprobs.size(), 2);
        EXPECT_LT(output.token.logprob, 0);
      }
    }
    for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(tokens[i], 60) << "nan after " << nan_after;
    EXPECT_GT(engine.stats().speculation.mean_length(), 1);
  }
}

// A window of a draft model holds one token more than there are drafts.
TEST(Speculation, WindowsOfTheDraftModelMustFitIt) {
  FakeModel model(kVocab), draft_model(kVocab);
  draft_model.longest = 4;
  EngineOptions options = options_of({fixed(DraftMethod::kDraftModel, 3)});
  options.draft_model = &draft_model;
  Engine(model, nullptr, options);
  options.speculative->tokens = 4;
  EXPECT_THAT([&] { Engine(model, nullptr, options); },
              ThrowsMessage<Error>(HasSubstr("expected at most 3 of this draft model, got 4")));
}

// Texts that share a prompt's blocks need more of the draft model's than of their own.
TEST(Speculation, ADraftModelShortOfBlocksDraftsForFewer) {
  FakeModel model(kVocab), draft_model(kVocab);
  EngineOptions options = options_of({fixed(DraftMethod::kDraftModel, 3)});
  options.draft_model = &draft_model;
  options.prefix_cache_bytes = 1 << 20;
  options.prefix_interval = kPrefillChunk;
  options.kv_blocks = 10;
  Engine engine(model, nullptr, options);
  std::map<int64_t, Request> requests;
  for (int i = 0; i < 4; ++i) {
    Request request = request_of(0, 130, 40, 0);
    request.prompt.push_back(i);
    requests[engine.add(request)] = request;
    engine.step();  // the prefix is there for the next ones
    engine.step();
  }
  const Outputs first = run(engine);
  for (const auto& [id, request] : requests) {
    const auto expected = expected_output(request, kVocab);
    const auto& got = first.at(id);  // but for what came before
    EXPECT_EQ(got, std::vector<int32_t>(expected.end() - std::ssize(got), expected.end()));
  }
  EXPECT_GT(engine.stats().cached_tokens, 0);
  EXPECT_GT(engine.stats().speculation.mean_length(), 1);
}

// A draft model that is the model itself is always right.
TEST(Speculation, ADraftModelThatIsTheModelIsAlwaysRight) {
  FakeModel model(64), draft_model(64);
  EngineOptions options = options_of({fixed(DraftMethod::kDraftModel, 4)});
  options.draft_model = &draft_model;
  Engine engine(model, nullptr, options);
  Request request{
      .prompt = {5, 6, 7}, .sampling = {}, .max_tokens = 101, .stop_ids = {}, .stop = {}};
  engine.add(request);
  while (!engine.idle()) engine.step();
  // The first token is the prompt's, every window brings five.
  EXPECT_EQ(engine.stats().speculation.windows, 20);
  EXPECT_EQ(engine.stats().speculation.kept_tokens, 100);
}

TEST(Speculation, EndsWhereTheRequestEnds) {
  for (int64_t max_tokens = 1; max_tokens < 12; ++max_tokens) {
    FakeModel model(64), draft_model(64);
    EngineOptions options = options_of({fixed(DraftMethod::kDraftModel, 4)});
    options.draft_model = &draft_model;
    options.max_model_len = 14;
    Engine engine(model, nullptr, options);
    engine.add({.prompt = {5, 6, 7},
                .sampling = {},
                .max_tokens = max_tokens,
                .stop_ids = {},
                .stop = {}});
    int64_t tokens = 0;
    FinishReason finish = FinishReason::kNone;
    while (!engine.idle()) {
      for (const auto& output : engine.step()) {
        EXPECT_EQ(finish, FinishReason::kNone);
        finish = output.finish;
        ++tokens;
      }
    }
    EXPECT_EQ(tokens, std::min<int64_t>(max_tokens, 11));
    EXPECT_EQ(finish, FinishReason::kLength);
  }
}

TEST(Speculation, RefusesWhatCannotWork) {
  FakeModel model(64), other(65);
  const auto refused = [&](EngineOptions options, const char* message) {
    EXPECT_THAT([&] { Engine(model, nullptr, options); }, ThrowsMessage<Error>(HasSubstr(message)));
  };
  EngineOptions options;
  options.speculative = SpeculativeConfig{.method = DraftMethod::kMtp};
  refused(options, "expected a model with multi-token-prediction tensors");
  options.speculative->method = DraftMethod::kDraftModel;
  options.draft_model = &other;
  refused(options, "same vocabulary of 64 tokens, got 65");
  model.longest = 16;
  options.speculative = SpeculativeConfig{.tokens = 8, .tree_width = 2};
  refused(options, "expected windows of at most 16 tokens here, got drafts of 16");
  options.speculative = SpeculativeConfig{.tree_width = 2, .snapshots = true};
  refused(options, "tree_width: expected 1");
  options.speculative = SpeculativeConfig{};
  options.route = Route::kConventional;
  refused(options, "through the ring");
}

// The third token of a prompt has the distribution that the model's probabilities give, whether the
// drafts were drawn from another model or chosen by it.
TEST(Speculation, SampledTokensHaveTheModelsDistribution) {
  const SamplingParams sampling{.temperature = 0.9, .top_k = 5, .top_p = 0.95, .min_p = 0.02};
  const std::vector<int32_t> prompt = {1, 2, 3};
  uint64_t start = 0;
  for (const int32_t id : prompt) start = extend_hash(start, id);
  std::vector<double> expected(kVocab, 0);
  for (const auto& [a, pa] : distribution(logits_of(start, kVocab), sampling, {}, {})) {
    const uint64_t first = extend_hash(start, a);
    for (const auto& [b, pb] : distribution(logits_of(first, kVocab), sampling, {}, {})) {
      const uint64_t second = extend_hash(first, b);
      for (const auto& [c, pc] : distribution(logits_of(second, kVocab), sampling, {}, {}))
        expected[c] += pa * pb * pc;
    }
  }
  for (const bool sampled : {true, false}) {
    FakeModel model(kVocab), draft_model(kVocab);
    draft_model.salt = 12345;
    EngineOptions options = options_of({fixed(DraftMethod::kDraftModel, 3)});
    options.speculative->sampled = sampled;
    options.draft_model = &draft_model;
    options.max_num_seqs = 16;
    Engine engine(model, nullptr, options);
    constexpr int64_t kRequests = 4000;
    for (int64_t i = 0; i < kRequests; ++i) {
      Request request;
      request.prompt = prompt;
      request.sampling = sampling;
      request.sampling.seed = static_cast<uint64_t>(1000 + i);
      request.max_tokens = 5;
      engine.add(request);
    }
    const Outputs outputs = run(engine);
    std::vector<int64_t> counts(kVocab, 0);
    for (const auto& [id, tokens] : outputs) ++counts[tokens.at(2)];
    double chi_square = 0;
    for (int64_t v = 0; v < kVocab; ++v) {
      const double mean = expected[v] * kRequests;
      if (mean > 0) {
        chi_square += std::pow(static_cast<double>(counts[v]) - mean, 2) / mean;
      } else {
        EXPECT_EQ(counts[v], 0);
      }
    }
    EXPECT_LT(chi_square, 33);  // five degrees of freedom: one in 250,000
    EXPECT_GT(engine.stats().speculation.mean_length(), 1.02);
  }
}

}  // namespace
}  // namespace replayssm
