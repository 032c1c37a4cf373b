// A model that runs behind the host: passes start before the tokens of those before them are known,
// and nothing of what comes out changes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "core/check.h"
#include "engine/fake_model.h"
#include "engine/requests.h"

namespace replayssm {
namespace {

using testing::cancel_any;
using testing::Dice;
using testing::expect_all_returned;
using testing::expected_output;
using testing::FakeModel;
using ::testing::HasSubstr;
using testing::Outputs;
using testing::run;

constexpr int64_t kVocab = 64;

// Without penalties, which look at tokens that must be known.
Request plain_request(int seed, int64_t prompt_len, int64_t max_tokens, double temperature) {
  Request request = testing::request_of(seed, prompt_len, max_tokens, temperature);
  request.sampling.repetition_penalty = 1;
  request.sampling.presence_penalty = 0;
  return request;
}

// What the request's text must be where the token `stop` ends it.
std::vector<int32_t> expected_until(const Request& request, int32_t stop) {
  std::vector<int32_t> tokens = expected_output(request, kVocab);
  const auto end = std::ranges::find(tokens, stop);
  if (end != tokens.end()) tokens.erase(std::next(end), tokens.end());
  return tokens;
}

class BehindModel : public FakeModel {
 public:
  explicit BehindModel(bool drawing = true) : FakeModel(kVocab) {
    behind = true;
    draws = drawing;
  }
};

struct Setting {
  Route route = Route::kOutputOnly;
  int32_t buffer_len = 16;
  int64_t max_num_seqs = 4, max_num_batched_tokens = 512, kv_blocks = 0;
  int32_t stop = -1;  // a token that ends texts, unforeseen
};

class BehindTexts : public ::testing::TestWithParam<Setting> {};

TEST_P(BehindTexts, TextsAreThoseOfEachRequestAlone) {
  const Setting& setting = GetParam();
  BehindModel model;
  EngineOptions options{.route = setting.route, .ring = {.buffer_len = setting.buffer_len}};
  options.max_num_seqs = setting.max_num_seqs;
  options.max_num_batched_tokens = setting.max_num_batched_tokens;
  options.kv_blocks = setting.kv_blocks;
  Outputs expected;
  {
    Engine engine(model, nullptr, options);
    for (int i = 0; i < 9; ++i) {
      Request request = plain_request(i, 1 + 13 * i % 50, 5 + 23 * i % 90, i % 3 * 0.4);
      if (setting.stop >= 0) request.stop_ids = {setting.stop};
      expected[engine.add(request)] = expected_until(request, setting.stop);
    }
    EXPECT_EQ(run(engine), expected);
    expect_all_returned(engine);
    EXPECT_GT(model.overlapped, engine.stats().steps / 8);
    EXPECT_EQ(engine.stats().preemptions > 0, setting.kv_blocks != 0);
  }
  EXPECT_EQ(model.unfinished(), 0);
}

INSTANTIATE_TEST_SUITE_P(Settings, BehindTexts,
                         ::testing::Values(Setting{}, Setting{Route::kOutputOnly, 1, 1},
                                           Setting{Route::kStateAndOutput, 5, 4, 7, 5},
                                           Setting{Route::kConventional, 16, 9, 9},
                                           Setting{Route::kOutputOnly, 7, 4, 512, 0, 5},
                                           Setting{Route::kOutputOnly, 3, 3, 16, 6, 17}));

// Requests come, go and wait again while passes are under way; slots, blocks and kept prefixes
// change hands.
TEST(Behind, RandomTraffic) {
  int64_t overlapped = 0, swaps = 0, cached = 0;
  for (uint64_t seed = 0; seed < 80; ++seed) {
    Dice random(seed);
    BehindModel model(random(0, 3) > 0);
    EngineOptions options{.route = static_cast<Route>(random(0, 2))};
    options.ring.buffer_len = static_cast<int32_t>(random(1, 20));
    options.max_num_seqs = random(1, 6);
    options.max_num_batched_tokens = options.max_num_seqs + random(0, 40);
    options.kv_blocks = random(7, 14);
    options.prefix_cache_bytes = random(0, 1) << 20;
    options.prefix_interval = kPrefillChunk;
    options.swap_bytes = random(0, 1) << 20;
    Engine engine(model, nullptr, options);
    const auto stop = static_cast<int32_t>(random(0, kVocab - 1));
    std::map<int64_t, Request> requests;
    Outputs outputs;
    for (int step = 0; step < 150 || !engine.idle(); ++step) {
      if (step < 150 && random(0, 9) == 0) {
        Request request =
            plain_request(static_cast<int>(random(0, 9)), random(1, 140), random(1, 60),
                          model.draws ? static_cast<double>(random(0, 1)) : 0);
        if (random(0, 7) == 0) request.sampling.presence_penalty = 0.3;
        request.stop_ids = {stop};
        requests[engine.add(request)] = request;
      }
      if (!requests.empty() && random(0, 30) == 0) {
        cancel_any(engine, requests, random);
      }
      for (const auto& output : engine.step()) outputs[output.request].push_back(output.token.id);
    }
    for (const auto& [id, request] : requests) {
      ASSERT_EQ(outputs[id], expected_until(request, stop)) << "seed " << seed << " request " << id;
    }
    EXPECT_EQ(engine.kv().free_blocks() + engine.stats().prefixes.nodes, engine.kv().blocks());
    overlapped += model.overlapped;
    swaps += engine.stats().swaps;
    cached += engine.stats().cached_tokens;
  }
  EXPECT_GT(overlapped, 1000);
  EXPECT_GT(swaps, 10);
  EXPECT_GT(cached, 100);
}

// Every step gives its tokens: the first after the prompts as well as the last.
TEST(Behind, EveryStepGivesOneTokenOfEachRequest) {
  BehindModel model;
  Engine engine(model, nullptr, {.max_num_seqs = 2});
  engine.add(plain_request(1, 5, 10, 0));
  engine.add(plain_request(2, 5, 10, 0.7));
  for (int step = 0; step < 10; ++step) EXPECT_EQ(engine.step().size(), 2) << "step " << step;
  EXPECT_TRUE(engine.idle());
  EXPECT_EQ(model.unfinished(), 0);  // the last tokens are known to be the last
  EXPECT_EQ(model.forwards, 10);
}

// What was started for texts that have ended is in nobody's way.
TEST(Behind, ARequestAfterTheLastOneHasEndedRunsAtOnce) {
  const Request request = plain_request(3, 6, 40, 0);
  const std::vector<int32_t> text = expected_output(request, kVocab);
  BehindModel model;
  Engine engine(model, nullptr, {.max_num_seqs = 1});
  Request stopped = request;
  stopped.stop_ids = {text[4]};
  engine.add(stopped);
  EXPECT_EQ(run(engine).at(0), expected_until(stopped, text[4]));
  EXPECT_EQ(model.unfinished(), 1);
  EXPECT_TRUE(engine.step().empty());
  EXPECT_EQ(model.unfinished(), 0);
  engine.add(request);
  EXPECT_EQ(engine.step().size(), 1);
  engine.step();
  EXPECT_EQ(model.unfinished(), 1);
  engine.cancel(1);
  engine.add(request);
  EXPECT_EQ(engine.step().size(), 1);
  EXPECT_EQ(run(engine).at(2).size(), 39);
}

// Requests that look at known tokens or at logits wait for them.
TEST(Behind, WaitsForTokensThatAreLookedAt) {
  const auto overlapped = [](auto change, bool draws = true, double temperature = 0.5) {
    BehindModel model(draws);
    Engine engine(model, nullptr, {.max_num_seqs = 2});
    Request request = plain_request(1, 5, 10, temperature);
    engine.add(request);
    change(request.sampling);
    engine.add(request);
    const Outputs outputs = run(engine);
    EXPECT_EQ(outputs.at(1), expected_output(request, kVocab));
    return model.overlapped;
  };
  const auto nothing = [](SamplingParams&) {};
  EXPECT_EQ(overlapped(nothing), 8);
  EXPECT_EQ(overlapped(nothing, false, 0), 8);
  EXPECT_EQ(overlapped(nothing, false), 0);
  EXPECT_EQ(overlapped([](SamplingParams& p) { p.frequency_penalty = 0.1; }), 0);
  EXPECT_EQ(overlapped([](SamplingParams& p) { p.logprobs = 1; }), 0);
  EXPECT_EQ(overlapped([](SamplingParams& p) { p.logit_bias = {{3, 1.0F}}; }), 0);
}

// A pass that does not start and one that does not end: the texts go on as if nothing had been.
TEST(Behind, IsAsBeforeAfterAPassThatFails) {
  for (int64_t at = 0; at < 12; ++at) {
    for (const bool at_finish : {false, true}) {
      BehindModel model;
      Engine engine(model, nullptr, {.max_num_seqs = 3});
      Outputs expected, outputs;
      for (int i = 0; i < 3; ++i) {
        const Request request = plain_request(i, 8, 8 + i, 0);
        expected[engine.add(request)] = expected_output(request, kVocab);
      }
      (at_finish ? model.fail_at_finish : model.fail_at_forward) = at;
      int thrown = 0;
      while (!engine.idle()) {
        try {
          for (const auto& output : engine.step())
            outputs[output.request].push_back(output.token.id);
        } catch (const Error&) {
          ++thrown;
        }
      }
      EXPECT_EQ(outputs, expected) << "at " << at << (at_finish ? " finish" : " start");
      EXPECT_LE(thrown, 1);
      if (at < 9) {
        EXPECT_EQ(thrown, 1) << "at " << at;
      }
      expect_all_returned(engine);
    }
  }
}

TEST(Behind, DropsOnlyTheRequestWhoseLogitsAreNaN) {
  const Request bad = plain_request(4, 12, 30, 0), good = plain_request(5, 9, 30, 0);
  const auto expected = expected_output(good, kVocab);
  BehindModel model;
  for (const int32_t id : expected_output(bad, kVocab)) {  // a token that only the bad one makes
    if (model.nan_after < 0 && std::ranges::count(expected, id) == 0 && id != good.prompt.back() &&
        id != bad.prompt.back())
      model.nan_after = id;
  }
  ASSERT_GE(model.nan_after, 0);
  Engine engine(model, nullptr, {.max_num_seqs = 2});
  engine.add(bad);
  const int64_t id = engine.add(good);
  std::string message;
  Outputs outputs = run(engine, message);
  EXPECT_THAT(message, HasSubstr("request 0, position"));
  EXPECT_EQ(outputs.at(id), expected);
  EXPECT_GT(model.overlapped, 20);
  expect_all_returned(engine);
}

TEST(Behind, RoutesChangeWhileAPassIsUnderWay) {
  BehindModel model;
  Engine engine(model, nullptr, {.route = Route::kConventional, .max_num_seqs = 2});
  Outputs expected, outputs;
  for (int i = 0; i < 3; ++i) {
    const Request request = plain_request(i, 8, 30, 0);
    expected[engine.add(request)] = expected_output(request, kVocab);
  }
  for (int step = 0; !engine.idle(); ++step) {
    if (step == 7) {
      EXPECT_EQ(model.unfinished(), 1);
      engine.set_route(Route::kOutputOnly);
      EXPECT_EQ(model.unfinished(), 0);
    }
    for (const auto& output : engine.step()) outputs[output.request].push_back(output.token.id);
  }
  EXPECT_EQ(outputs, expected);
}

}  // namespace
}  // namespace replayssm
