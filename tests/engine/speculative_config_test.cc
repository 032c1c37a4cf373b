#include "engine/speculative_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.h"
#include "core/philox.h"

namespace replayssm {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

TEST(SpeculativeConfig, ReadsAllKeys) {
  const SpeculativeConfig config = parse_speculative_config(
      R"({"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 3,
          "prompt_lookup_min": 1, "tree_width": 2, "adaptive": false})");
  EXPECT_EQ(config.method, DraftMethod::kNgram);
  EXPECT_EQ(config.tokens, 7);
  EXPECT_EQ(config.lookup_max, 3);
  EXPECT_EQ(config.lookup_min, 1);
  EXPECT_EQ(config.tree_width, 2);
  EXPECT_FALSE(config.adaptive);
  EXPECT_EQ(config.max_window(), 15);
  EXPECT_TRUE(
      parse_speculative_config(R"({"method": "mtp", "draft_sample_method": "probabilistic"})")
          .sampled);
  EXPECT_TRUE(
      parse_speculative_config(R"({"method": "mtp", "mtp_hidden": "before_norm"})").before_norm);
  EXPECT_EQ(parse_speculative_config(R"({"method": "draft_model", "model": "x"})").model, "x");
  EXPECT_EQ(parse_speculative_config(R"({"method": "ngram", "prompt_lookup_max": 1})").lookup_min,
            1);
}

TEST(SpeculativeConfig, RefusesWithTheReason) {
  const struct {
    const char *text, *message;
  } cases[] = {
      {"", "--speculative-config"},
      {"[]", "--speculative-config"},
      {"{}", "method: expected ngram, suffix, mtp or draft_model, got nothing"},
      {R"({"method": "eagle"})", "got \"eagle\""},
      {R"({"method": 3})", "method: expected"},
      {R"({"method": "ngram", "num_speculative_tokens": 0})", "expected 1 to 63, got 0"},
      {R"({"method": "ngram", "num_speculative_tokens": 64})", "expected 1 to 63"},
      {R"({"method": "ngram", "num_speculative_tokens": 4.5})", "expected 1 to 63"},
      {R"({"method": "ngram", "num_speculative_tokens": 18446744073709551615})",
       "expected 1 to 63"},
      {R"({"method": "ngram", "num_speculative_tokens": "4"})", "expected 1 to 63"},
      {R"({"method": "ngram", "num_speculative_tokens": 9, "tree_width": 8})",
       "at most 63, got 9 x 8"},
      {R"({"method": "ngram", "prompt_lookup_min": 6})", "at most prompt_lookup_max = 5, got 6"},
      {R"({"method": "ngram", "draft_sample_method": "probabilistic"})",
       "expected greedy for ngram"},
      {R"({"method": "mtp", "draft_sample_method": "often"})", "greedy or probabilistic"},
      {R"({"method": "draft_model"})", "expected the draft model, got nothing"},
      {R"({"method": "draft_model", "model": "x", "tree_width": 2})", "expected 1 for draft_model"},
      {R"({"method": "ngram", "model": "x"})", "no such key but for draft_model"},
      {R"({"method": "ngram", "depth": 4})", "unknown key \"depth\""},
      {R"({"method": "ngram", "adaptive": 1})", "true or false"},
      {R"({"method": "ngram", "method": "mtp"})", "--speculative-config"},
  };
  for (const auto& [text, message] : cases) {
    EXPECT_THAT([&] { parse_speculative_config(text); }, ThrowsMessage<Error>(HasSubstr(message)))
        << text;
  }
}

// Whatever is cut, doubled or overwritten: a configuration within its limits, or one line about it.
TEST(SpeculativeConfig, MalformedTextIsRefusedInOneLine) {
  const std::string valid =
      R"({"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 3, "tree_width": 2})";
  constexpr std::string_view kBytes = "{}[]\",:0-9.eE+tfn\\\x01\xff";
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    int64_t drawn = 0;
    const auto random = [&](size_t most) {
      return static_cast<size_t>(uniform(seed, drawn++) * static_cast<double>(most));
    };
    std::string text = valid;
    for (size_t edit = 0; edit <= random(3); ++edit) {
      const size_t at = random(text.size()), count = random(8);
      if (random(2) == 0) {
        text.erase(at, count);
      } else {
        text.insert(at, 1 + random(2), kBytes[random(kBytes.size())]);
      }
    }
    try {
      const SpeculativeConfig config = parse_speculative_config(text);
      EXPECT_LE(config.max_window(), 1 + kMostDraftTokens) << text;
      EXPECT_GE(config.tokens, 1) << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), StartsWith("--speculative-config"));
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << text;
    }
  }
}

}  // namespace
}  // namespace replayssm
