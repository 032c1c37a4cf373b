// The prefix cache, swapped states and priorities: never a change of what comes out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>

#include "core/check.h"
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

constexpr int64_t kManyBytes = 1 << 20;

// `shared` tokens that all requests of a family have in common, and some of its own.
Request family_member(int family, int64_t shared, int seed, int64_t own, int64_t max_tokens) {
  Request request = request_of(seed, own, max_tokens, seed % 2);
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < shared; ++i)
    prompt.push_back(static_cast<int32_t>((family + i * i) % 64));
  request.prompt.insert(request.prompt.begin(), prompt.begin(), prompt.end());
  return request;
}

struct Answer {
  std::vector<int32_t> tokens;
  int64_t cached = -1;
};

Answer run_one(Engine& engine, const Request& request) {
  const int64_t id = engine.add(request);
  Answer result;
  while (!engine.idle()) {
    for (const RequestOutput& output : engine.step()) {
      EXPECT_EQ(output.request, id);
      result.tokens.push_back(output.token.id);
      result.cached = output.cached_tokens;
    }
  }
  return result;
}

EngineOptions with_cache(int64_t bytes = kManyBytes) {
  EngineOptions options;
  options.prefix_cache_bytes = bytes;
  options.prefix_interval = kPrefillChunk;
  return options;
}

TEST(PrefixCache, ContinuesWhereAnEarlierPromptWas) {
  for (const bool attention : {true, false}) {
    FakeModel model(64, 512, attention);
    Engine engine(model, nullptr, with_cache());
    const Request first = family_member(1, 200, 1, 10, 20);
    EXPECT_EQ(run_one(engine, first).cached, 0);
    const Answer again = run_one(engine, first);
    EXPECT_EQ(again.tokens, expected_output(first));
    EXPECT_EQ(again.cached, 192);
    const Request sibling = family_member(1, 200, 2, 30, 20);
    const Answer other = run_one(engine, sibling);
    EXPECT_EQ(other.tokens, expected_output(sibling));
    EXPECT_EQ(other.cached, 192);
    const Request stranger = family_member(2, 200, 2, 30, 20);
    EXPECT_EQ(run_one(engine, stranger).cached, 0);
    EXPECT_EQ(engine.stats().cached_tokens, 2 * 192);
  }
}

// One token is left even where the whole prompt is known: its logits are needed.
TEST(PrefixCache, LeavesATokenToCompute) {
  FakeModel model(64, 512);
  Engine engine(model, nullptr, with_cache());
  const Request request = family_member(1, 127, 1, 1, 5);
  run_one(engine, request);
  const Answer again = run_one(engine, request);
  EXPECT_EQ(again.cached, 64);
  EXPECT_EQ(again.tokens, expected_output(request));
}

// Regular snapshots lie far apart: the second request that shares more than the first one's last
// leaves one where the two part.
TEST(PrefixCache, LearnsWherePromptsPart) {
  FakeModel model(64, 512);
  EngineOptions options = with_cache();
  options.prefix_interval = 256;
  Engine engine(model, nullptr, options);
  EXPECT_EQ(run_one(engine, family_member(3, 200, 1, 10, 4)).cached, 0);
  EXPECT_EQ(run_one(engine, family_member(3, 200, 2, 10, 4)).cached, 0);
  const Request third = family_member(3, 200, 3, 10, 4);
  const Answer result = run_one(engine, third);
  EXPECT_EQ(result.cached, 192);
  EXPECT_EQ(result.tokens, expected_output(third));
}

TEST(PrefixCache, ForgetsWhatWasUnusedLongest) {
  FakeModel model(64, 512);
  const Engine sized(model, nullptr, with_cache());
  EngineOptions options = with_cache(sized.slots().snapshot_bytes() * 2);
  options.prefix_interval = 128;
  Engine engine(model, nullptr, options);
  const auto member = [](int family) { return family_member(family, 150, family, 5, 2); };
  run_one(engine, member(1));
  run_one(engine, member(2));
  EXPECT_EQ(run_one(engine, member(1)).cached, 128);
  run_one(engine, member(3));  // takes the place of 2
  EXPECT_EQ(engine.stats().prefixes.snapshots, 2);
  EXPECT_EQ(engine.stats().prefixes.evicted_snapshots, 1);
  EXPECT_EQ(run_one(engine, member(1)).cached, 128);
  EXPECT_EQ(run_one(engine, member(2)).cached, 0);
}

// More blocks than a small cache keeps: the path that was just taken stays whole.
TEST(PrefixCache, KeepsAPromptLongerThanItself) {
  FakeModel model(64, 40'000);
  EngineOptions options = with_cache();
  options.max_num_seqs = 1;
  options.max_num_batched_tokens = 4096;
  options.prefix_interval = 33'024;
  Engine engine(model, nullptr, options);
  const Request request = family_member(1, 34'000, 1, 10, 2);
  EXPECT_EQ(run_one(engine, request).cached, 0);
  const Answer again = run_one(engine, request);
  EXPECT_EQ(again.cached, 33'024);
  EXPECT_EQ(again.tokens, expected_output(request));
}

TEST(PrefixCache, GivesItsBlocksToWhoNeedsThem) {
  FakeModel model(64, 512);
  EngineOptions options = with_cache();
  options.kv_blocks = 9;
  Engine engine(model, nullptr, options);
  for (int family = 0; family < 6; ++family) {
    const Request request = family_member(family, 200, family, 20, 40);
    EXPECT_EQ(run_one(engine, request).tokens, expected_output(request));
  }
  EXPECT_EQ(engine.kv().free_blocks() + engine.stats().prefixes.nodes, 9);
  EXPECT_GT(engine.stats().prefixes.evicted_blocks, 0);
}

TEST(PrefixCache, RefusesSizesThatMakeNoSense) {
  FakeModel model;
  EngineOptions options = with_cache(10);
  EXPECT_THAT([&] { Engine(model, nullptr, options); },
              ThrowsMessage<Error>(HasSubstr("prefix_cache_bytes: expected at least")));
  options = with_cache();
  options.prefix_interval = 100;
  EXPECT_THAT([&] { Engine(model, nullptr, options); },
              ThrowsMessage<Error>(HasSubstr("prefix_interval: expected a multiple of 64")));
}

TEST(Swap, KeepsWhatAPreemptedRequestHeld) {
  for (const Route route : {Route::kOutputOnly, Route::kConventional}) {
    FakeModel model;
    EngineOptions options{.route = route};
    options.ring.buffer_len = 5;
    options.max_num_seqs = 4;
    options.kv_blocks = 6;
    options.swap_bytes = kManyBytes;
    Engine engine(model, nullptr, options);
    std::map<int64_t, Request> requests;
    int64_t prompts = 0;
    for (int i = 0; i < 6; ++i) {
      const Request request = request_of(i, 20 + i, 70);
      prompts += std::ssize(request.prompt);
      requests[engine.add(request)] = request;
    }
    const Outputs outputs = run(engine);
    for (const auto& [id, request] : requests) EXPECT_EQ(outputs.at(id), expected_output(request));
    EXPECT_GT(engine.stats().swaps, 0);
    EXPECT_EQ(engine.stats().swaps, engine.stats().preemptions);
    EXPECT_EQ(engine.stats().prefill_tokens, prompts);
    expect_all_returned(engine);
  }
}

TEST(Priorities, GoBeforeTheTimeOfArrival) {
  FakeModel model;
  Engine engine(model, nullptr, {.max_num_seqs = 1});
  for (const int64_t priority : {5, 0, 5, -1}) {
    Request request = request_of(1, 5, 3);
    request.priority = priority;
    engine.add(request);
  }
  std::vector<int64_t> order;
  while (!engine.idle()) {
    for (const RequestOutput& output : engine.step()) {
      if (output.finish != FinishReason::kNone) order.push_back(output.request);
    }
  }
  EXPECT_EQ(order, (std::vector<int64_t>{3, 1, 0, 2}));
}

// Families of prompts come and go at random, with priorities, over pools, caches and swap spaces of
// random sizes; the route changes on the way.
TEST(PrefixCache, ChangesNothingUnderRandomTraffic) {
  int64_t hits = 0, swaps = 0, evicted = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Dice random(seed);
    FakeModel model(64, 320, random(0, 3) > 0);
    EngineOptions options = with_cache(random(1, 12) * 1280);
    options.prefix_interval = kPrefillChunk * random(1, 2);
    options.ring.buffer_len = static_cast<int32_t>(random(1, 20));
    options.max_num_seqs = random(1, 5);
    options.max_num_batched_tokens = options.max_num_seqs + random(0, 150);
    options.kv_blocks = random(10, 24);
    options.swap_bytes = random(0, 1) * random(0, 100000);
    Engine engine(model, nullptr, options);
    std::map<int64_t, Request> requests;
    Outputs outputs;
    for (int step = 0; step < 200 || !engine.idle(); ++step) {
      if (step < 200 && random(0, 4) == 0) {
        Request request = family_member(static_cast<int>(random(0, 2)), random(0, 200), step,
                                        random(1, 40), random(1, 60));
        request.priority = random(0, 2);
        requests[engine.add(request)] = request;
      }
      if (!requests.empty() && random(0, 40) == 0) {
        cancel_any(engine, requests, random);
      }
      if (random(0, 60) == 0) engine.set_route(static_cast<Route>(random(0, 2)));
      for (const auto& output : engine.step()) outputs[output.request].push_back(output.token.id);
      for (const RunningRequest& running : engine.running_requests()) {
        const Cursor cursor = engine.slots().cursor(running.slot);
        ASSERT_EQ(running.cursor.ring_start, cursor.ring_start);
        ASSERT_EQ(running.cursor.ring_count, cursor.ring_count);
        ASSERT_EQ(running.cursor.ring_limit, cursor.ring_limit);
      }
    }
    EXPECT_EQ(engine.stats().folds, model.folds) << "seed " << seed;
    for (const auto& [id, request] : requests) {
      ASSERT_EQ(outputs[id], expected_output(request)) << "seed " << seed << " request " << id;
    }
    const EngineStats stats = engine.stats();
    hits += stats.cached_tokens;
    swaps += stats.swaps;
    evicted += stats.prefixes.evicted_blocks;
    if (model.config().attention_layers() > 0) {
      EXPECT_EQ(engine.kv().free_blocks() + stats.prefixes.nodes, engine.kv().blocks());
    }
  }
  EXPECT_GT(hits, 0);
  EXPECT_GT(swaps, 0);
  EXPECT_GT(evicted, 0);
}

}  // namespace
}  // namespace replayssm
