// Requests for engines over a FakeModel, and what must come out.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/philox.h"
#include "engine/engine.h"
#include "engine/fake_model.h"

namespace replayssm::testing {

inline Request request_of(int seed, int64_t prompt_len, int64_t max_tokens,
                          double temperature = 1) {
  Request request;
  for (int64_t i = 0; i < prompt_len; ++i) {
    request.prompt.push_back(static_cast<int32_t>((seed * 17 + i * i) % 64));
  }
  request.max_tokens = max_tokens;
  request.sampling = {.temperature = temperature,
                      .top_k = 20,
                      .top_p = 0.9,
                      .repetition_penalty = 1.1,
                      .presence_penalty = 0.2,
                      .seed = static_cast<uint64_t>(seed)};
  return request;
}

// The output by the definition: logits of all tokens so far, one sample, and again. `vocab` is the
// model's.
inline std::vector<int32_t> expected_output(const Request& request, int64_t vocab = 64) {
  uint64_t hash = 0;
  for (const int32_t id : request.prompt) hash = extend_hash(hash, id);
  std::vector<int32_t> output;
  for (int64_t i = 0; i < request.max_tokens; ++i) {
    const auto position = static_cast<int64_t>(request.prompt.size() + output.size());
    const auto token =
        sample(logits_of(hash, vocab), request.sampling, request.prompt, output, position);
    output.push_back(token.id);
    hash = extend_hash(hash, token.id);
  }
  return output;
}

using Outputs = std::map<int64_t, std::vector<int32_t>>;

inline Outputs run(Engine& engine) {
  Outputs outputs;
  while (!engine.idle()) {
    for (const RequestOutput& output : engine.step()) {
      outputs[output.request].push_back(output.token.id);
    }
  }
  return outputs;
}

// Goes on behind errors; the last one's message is left in `error`.
inline Outputs run(Engine& engine, std::string& error) {
  Outputs outputs;
  while (!engine.idle()) {
    try {
      for (const RequestOutput& output : engine.step())
        outputs[output.request].push_back(output.token.id);
    } catch (const Error& caught) {
      error = caught.what();
    }
  }
  return outputs;
}

// Draws whole numbers evenly.
class Dice {
 public:
  explicit Dice(uint64_t seed) : seed_(seed) {}
  int64_t operator()(int64_t low, int64_t high) {
    return low +
           static_cast<int64_t>(uniform(seed_, drawn_++) * static_cast<double>(high - low + 1));
  }

 private:
  uint64_t seed_;
  int64_t drawn_ = 0;
};

// Cancels one of the requests that an engine was given, and forgets it.
inline void cancel_any(Engine& engine, std::map<int64_t, Request>& requests, Dice& random) {
  const auto cancelled = std::next(requests.begin(), random(0, std::ssize(requests) - 1));
  engine.cancel(cancelled->first);
  requests.erase(cancelled);
}

inline void expect_all_returned(const Engine& engine) {
  EXPECT_EQ(engine.kv().free_blocks(), engine.kv().blocks());
}

}  // namespace replayssm::testing
