#include "engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>

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
using testing::request_of;
using testing::run;
using ::testing::ThrowsMessage;

using Setting = std::tuple<Route, int32_t /* buffer_len */, int64_t /* max_num_seqs */,
                           int64_t /* max_num_batched_tokens */, int64_t /* kv_blocks */>;

class EngineTokens : public ::testing::TestWithParam<Setting> {};

TEST_P(EngineTokens, AreThoseOfEachRequestAlone) {
  const auto [route, buffer_len, sequences, tokens, kv_blocks] = GetParam();
  FakeModel model;
  EngineOptions options{.route = route, .ring = {.buffer_len = buffer_len}};
  options.max_num_seqs = sequences;
  options.max_num_batched_tokens = tokens;
  options.kv_blocks = kv_blocks;
  Engine engine(model, nullptr, options);
  std::map<int64_t, Request> requests;
  for (int i = 0; i < 9; ++i) {
    const Request request = request_of(i, 1 + 13 * i % 50, 5 + 23 * i % 90, i % 3);
    requests[engine.add(request)] = request;
  }
  const Outputs outputs = run(engine);
  ASSERT_EQ(outputs.size(), requests.size());
  for (const auto& [id, request] : requests) {
    EXPECT_EQ(outputs.at(id), expected_output(request)) << "request " << id;
  }
  expect_all_returned(engine);
  EXPECT_EQ(model.folds > 0, route != Route::kConventional);
  if (sequences > 1) {
    EXPECT_GT(model.mixed_forwards, 0);
  }
  if (sequences == 4) {
    EXPECT_EQ(engine.stats().preemptions > 0, kv_blocks != 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, EngineTokens,
                         ::testing::Values(Setting{Route::kOutputOnly, 16, 1, 512, 0},
                                           Setting{Route::kOutputOnly, 16, 4, 512, 0},
                                           Setting{Route::kOutputOnly, 1, 4, 7, 0},
                                           Setting{Route::kOutputOnly, 5, 4, 7, 5},
                                           Setting{Route::kStateAndOutput, 7, 4, 16, 6},
                                           Setting{Route::kStateAndOutput, 64, 9, 9, 0},
                                           Setting{Route::kConventional, 16, 4, 512, 5},
                                           Setting{Route::kConventional, 3, 4, 5, 0}));

// Requests come and go at random, with pools of random sizes.
TEST(Engine, KeepsRequestsApartUnderRandomTraffic) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Dice random(seed);
    FakeModel model;
    EngineOptions options{.route = static_cast<Route>(random(0, 2))};
    options.ring.buffer_len = static_cast<int32_t>(random(1, 20));
    options.max_num_seqs = random(1, 6);
    options.max_num_batched_tokens = options.max_num_seqs + random(0, 40);
    options.kv_blocks = random(4, 10);
    Engine engine(model, nullptr, options);
    std::map<int64_t, Request> requests;
    Outputs outputs;
    for (int step = 0; step < 150 || !engine.idle(); ++step) {
      if (step < 150 && random(0, 5) == 0) {
        const Request request = request_of(step, random(1, 60), random(1, 68), random(0, 1));
        requests[engine.add(request)] = request;
      }
      if (!requests.empty() && random(0, 40) == 0) {
        cancel_any(engine, requests, random);
      }
      for (const auto& output : engine.step()) outputs[output.request].push_back(output.token.id);
    }
    for (const auto& [id, request] : requests) {
      ASSERT_EQ(outputs[id], expected_output(request)) << "seed " << seed << " request " << id;
    }
    expect_all_returned(engine);
  }
}

TEST(Engine, ServesModelsWithoutAttention) {
  FakeModel model(64, 256, false);
  Engine engine(model, nullptr, {.max_num_seqs = 3});
  Outputs expected;
  for (int i = 0; i < 5; ++i) {
    const Request request = request_of(i, 3 + i, 30);
    expected[engine.add(request)] = expected_output(request);
  }
  EXPECT_EQ(run(engine), expected);
}

TEST(Engine, KeepsSequencesThatStillRunWhenOthersAreCancelled) {
  FakeModel model;
  Engine engine(model, nullptr, {.max_num_seqs = 2, .max_num_batched_tokens = 8});
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(request_of(i, 20, 12));
    engine.add(requests.back());
  }
  Outputs outputs;
  for (int step = 0; !engine.idle(); ++step) {
    if (step == 1) engine.cancel(0);  // half a prompt
    if (step == 2) engine.cancel(3);  // waiting
    if (step == 9) engine.cancel(1);  // decoding
    engine.cancel(77);
    for (const RequestOutput& output : engine.step()) {
      outputs[output.request].push_back(output.token.id);
    }
  }
  EXPECT_EQ(outputs.count(0) + outputs.count(3), 0);
  EXPECT_EQ(outputs.at(2), expected_output(requests[2]));
  EXPECT_LT(outputs.at(1).size(), 12);
  expect_all_returned(engine);
}

TEST(Engine, EndsAtEosAndStopIds) {
  FakeModel model;
  const Request request = request_of(3, 10, 40);
  const auto all = expected_output(request);
  const auto ends_with = [&](auto prepare) {
    FakeModel fake;
    Request changed = request;
    prepare(fake.mutable_config(), changed);
    Engine engine(fake, nullptr, {});
    engine.add(changed);
    std::vector<RequestOutput> outputs;
    while (!engine.idle()) {
      for (auto& output : engine.step()) outputs.push_back(output);
    }
    return std::pair(static_cast<int64_t>(outputs.size()), outputs.back().finish);
  };
  const auto first = [&](int32_t id) { return std::ranges::find(all, id) - all.begin() + 1; };
  const int32_t a = all[7], b = all[20];
  EXPECT_EQ(ends_with([](ModelConfig&, Request&) {}),
            std::pair(int64_t{40}, FinishReason::kLength));
  EXPECT_EQ(ends_with([&](ModelConfig& config, Request&) { config.eos_ids = {b, a}; }),
            std::pair(std::min(first(a), first(b)), FinishReason::kStop));
  EXPECT_EQ(ends_with([&](ModelConfig& config, Request& changed) {
              config.eos_ids = {a};
              changed.ignore_eos = true;
            }),
            std::pair(int64_t{40}, FinishReason::kLength));
  EXPECT_EQ(ends_with([&](ModelConfig& config, Request& changed) {
              config.eos_ids = {a};
              changed.ignore_eos = true;
              changed.stop_ids = {b};
            }),
            std::pair(first(b), FinishReason::kStop));
}

TEST(Engine, EndsWhereTheContextEnds) {
  FakeModel model(64, 256);
  Engine engine(model, nullptr, {.max_model_len = 40});
  EXPECT_EQ(engine.max_model_len(), 40);
  engine.add(request_of(1, 33, 100));
  int64_t tokens = 0;
  FinishReason finish = FinishReason::kNone;
  while (!engine.idle()) {
    for (const auto& output : engine.step()) {
      ++tokens;
      finish = output.finish;
    }
  }
  EXPECT_EQ(tokens, 7);
  EXPECT_EQ(finish, FinishReason::kLength);
}

TEST(Engine, IsAsBeforeAfterAForwardThatThrows) {
  FakeModel model;
  Engine engine(model, nullptr, {.max_num_seqs = 2, .max_num_batched_tokens = 16});
  Outputs expected;
  for (int i = 0; i < 4; ++i) {
    const Request request = request_of(i, 20, 12);
    expected[engine.add(request)] = expected_output(request);
  }
  Outputs outputs;
  model.fail_at_forward = 5;
  int thrown = 0;
  while (!engine.idle()) {
    try {
      for (const auto& output : engine.step()) outputs[output.request].push_back(output.token.id);
    } catch (const Error&) {
      ++thrown;
    }
  }
  EXPECT_EQ(thrown, 1);
  EXPECT_EQ(outputs, expected);
  expect_all_returned(engine);
}

TEST(Engine, DropsOnlyTheRequestWhoseLogitsAreNaN) {
  FakeModel model;
  Engine engine(model, nullptr, {.max_num_seqs = 3});
  const Request bad = request_of(4, 12, 30), good = request_of(5, 9, 30);
  const auto expected = expected_output(good);
  for (const int32_t id : expected_output(bad)) {  // a token that only the bad one makes
    if (model.nan_after < 0 && std::ranges::count(expected, id) == 0 && id != good.prompt.back() &&
        id != bad.prompt.back()) {
      model.nan_after = id;
    }
  }
  ASSERT_GE(model.nan_after, 0);
  engine.add(bad);
  const int64_t id = engine.add(good);
  std::string message;
  Outputs outputs = run(engine, message);
  EXPECT_THAT(message, HasSubstr("request 0, position"));
  EXPECT_THAT(message, HasSubstr("NaN"));
  EXPECT_EQ(outputs.at(id), expected);
  EXPECT_LT(outputs[0].size(), 30);
  expect_all_returned(engine);
}

TEST(Engine, RefusesRequestsThatCannotRun) {
  FakeModel model;
  EngineOptions options{.max_model_len = 200};
  options.kv_blocks = 3;
  Engine engine(model, nullptr, options);
  const auto refused = [&](auto change, const char* message) {
    Request request = request_of(1, 10, 10);
    change(request);
    EXPECT_THAT([&] { engine.add(request); }, ThrowsMessage<Error>(HasSubstr(message)));
  };
  refused([](Request& r) { r.prompt.clear(); }, "prompt: expected at least one token");
  refused([](Request& r) { r.prompt[3] = 64; }, "prompt: token id 64 at position 3");
  refused([](Request& r) { r.prompt[3] = -1; }, "prompt: token id -1 at position 3");
  refused([](Request& r) { r.prompt.assign(200, 1); }, "expected at most 199");
  refused([](Request& r) { r.prompt.assign(90, 1); }, "100 tokens of prompt and output");
  refused([](Request& r) { r.max_tokens = 0; }, "max_tokens: expected at least 1, got 0");
  refused([](Request& r) { r.sampling.top_p = 0; }, "top_p");
  refused([](Request& r) { r.stop = {""}; }, "stop: expected a text");
  refused([](Request& r) { r.stop = {"\xa9"}; }, "stop: expected UTF-8");
  refused([](Request& r) { r.stop = {"x"}; }, "need a tokenizer");
  EXPECT_TRUE(engine.idle());
}

TEST(Engine, RefusesOptionsThatContradict) {
  FakeModel model;
  const auto refused = [&](const EngineOptions& options, const char* message) {
    EXPECT_THAT([&] { Engine(model, nullptr, options); }, ThrowsMessage<Error>(HasSubstr(message)));
  };
  refused({.max_num_seqs = 0}, "max_num_seqs: expected at least 1");
  refused({.max_num_seqs = 8, .max_num_batched_tokens = 7}, "at least max_num_seqs = 8, got 7");
  refused({.max_model_len = 257}, "max_model_len: expected at most 256");
  refused({.max_model_len = -1}, "max_model_len");
  refused({.route = Route::kConventional, .read_dtype = DType::kInt8}, "read copy of int8");
  refused({.state_dtype = DType::kBFloat16, .read_dtype = DType::kFloat16}, "got float16");
}

}  // namespace
}  // namespace replayssm
