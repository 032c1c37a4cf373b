// Text of requests: a model that says what it is told to, with a bundled model's tokenizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "engine/engine.h"

namespace replayssm {
namespace {

// Says the given tokens, whatever the prompt of one token.
class Parrot final : public Model {
 public:
  Parrot(std::vector<int32_t> words, int64_t vocab) : words_(std::move(words)) {
    config_.vocab_size = vocab;
    config_.max_positions = 1000;
    config_.eos_ids = {0, 2};
  }
  const ModelConfig& config() const override { return config_; }
  DType activation_dtype() const override { return DType::kFloat32; }
  int64_t weight_bytes() const override { return 0; }
  StageTimes& stage_times() override { return stage_times_; }
  Memory& memory() override { return host_memory(); }
  void forward(const Batch& batch, const StateView&, const PassOutput& output) override {
    // Every row of a window says what the text has there, whatever was drafted.
    for (size_t row = 0; row < batch.logit_tokens.size(); ++row) {
      const int32_t word = words_.at(batch.position[0] + row);
      if (output.logits) {
        std::fill_n(output.logits, config_.vocab_size, 0.0F);
        output.logits[word] = 1;
      } else {
        output.tokens[row] = word;
      }
    }
  }
  void commit(const Batch&, const WindowCommit& commit, const StateView&) override {
    accepted.push_back(commit.accepted[0]);
  }

  std::vector<int32_t> accepted;  // by commits

 private:
  std::vector<int32_t> words_;
  ModelConfig config_;
  StageTimes stage_times_;
};

struct Said {
  std::string text;
  std::vector<std::string> pieces;
  FinishReason finish = FinishReason::kNone;
  size_t tokens = 0;
  std::vector<int32_t> accepted;  // of windows with drafts
  size_t last_step = 0;           // tokens of the last step
};

const Tokenizer& tokenizer() {
  static const Tokenizer instance(std::string(REPLAYSSM_SOURCE_DIR) + "/models/tiny-qwen3.5");
  return instance;
}

Said say(const std::vector<int32_t>& words, std::vector<std::string> stop, bool ignore_eos = true,
         int64_t drafts = 0, std::shared_ptr<TokenConstraint> constraint = nullptr) {
  Parrot model(words, tokenizer().size());
  EngineOptions options;
  if (drafts > 0)
    options.speculative = SpeculativeConfig{.tokens = drafts, .lookup_min = 1, .adaptive = false};
  Engine engine(model, &tokenizer(), options);
  Request request;
  request.prompt = {65};
  request.max_tokens = static_cast<int64_t>(words.size());
  request.stop = std::move(stop);
  request.ignore_eos = ignore_eos;
  request.constraint = std::move(constraint);
  engine.add(request);
  Said said;
  while (!engine.idle()) {
    const auto outputs = engine.step();
    said.last_step = outputs.size();
    for (const RequestOutput& output : outputs) {
      said.text += output.text;
      said.pieces.push_back(output.text);
      said.finish = output.finish;
      ++said.tokens;
    }
  }
  said.accepted = model.accepted;
  return said;
}

// Tokens of a text, one byte each: every character and stop string crosses token boundaries.
std::vector<int32_t> bytes_of(std::string_view text) {
  std::vector<int32_t> ids;
  for (const char byte : text) {
    for (int32_t id = 0; id < tokenizer().size(); ++id) {
      const std::string_view bytes = tokenizer().token_bytes(id);
      if (bytes.size() != 1 || bytes[0] != byte || tokenizer().is_special(id)) continue;
      ids.push_back(id);
      break;
    }
  }
  return ids;
}

TEST(EngineText, IsTheDecodedOutput) {
  const std::string text = "naïve → 日本語 🙂!";
  ASSERT_EQ(bytes_of(text).size(), text.size());
  for (const auto& ids : {bytes_of(text), tokenizer().encode(text)}) {
    const Said said = say(ids, {});
    EXPECT_EQ(said.text, text);
    EXPECT_EQ(said.finish, FinishReason::kLength);
    for (const std::string& piece : said.pieces) {  // never begins within a character
      EXPECT_TRUE(piece.empty() || (static_cast<unsigned char>(piece[0]) & 0xc0) != 0x80);
    }
  }
}

TEST(EngineText, EndsBeforeTheStopString) {
  const std::string text = "one two 日本 three";
  for (const auto& [stop, expected] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{{{"two"}, "one "},
                                                                     {{"本"}, "one two 日"},
                                                                     {{" 日本 "}, "one two"},
                                                                     {{"x", "e t"}, "on"}}) {
    for (const auto& ids : {bytes_of(text), tokenizer().encode(text)}) {
      const Said said = say(ids, stop);
      EXPECT_EQ(said.text, expected);
      EXPECT_EQ(said.finish, FinishReason::kStop);
      EXPECT_LT(said.tokens, ids.size());
    }
  }
}

TEST(EngineText, GivesBackWhatItHeldWhenTheOutputEnds) {
  const Said said = say(bytes_of("a stop sto"), {"stop!"});
  EXPECT_EQ(said.text, "a stop sto");
  EXPECT_EQ(said.finish, FinishReason::kLength);
}

TEST(EngineText, ReplacesACharacterThatNeverCompletes) {
  auto ids = bytes_of("a日");
  ids.pop_back();
  EXPECT_EQ(say(ids, {}).text, "a\xef\xbf\xbd");
  const Said said = say(ids, {"\xef\xbf\xbd"});  // only the end of the output makes it one
  EXPECT_EQ(said.text, "a");
  EXPECT_EQ(said.finish, FinishReason::kStop);
}

TEST(EngineText, LeavesOutTheTokenThatEndsIt) {
  auto ids = bytes_of("abc");
  ids.insert(ids.begin() + 2, 2);
  const Said stopped = say(ids, {}, false);
  EXPECT_EQ(stopped.text, "ab");
  EXPECT_EQ(stopped.tokens, 3);
  EXPECT_EQ(stopped.finish, FinishReason::kStop);
  EXPECT_EQ(say(ids, {}).text, "abc");
}

// Lets any token come, up to a number of them.
class UpTo final : public TokenConstraint {
 public:
  UpTo(int64_t most, bool whole) : left_(most), whole_(whole), all_(tokenizer().size(), 1) {}
  std::span<const uint8_t> allowed() override { return all_; }
  void accept(int32_t) override { --left_; }
  bool may_end() const override { return whole_ && left_ == 0; }
  bool complete() override { return left_ == 0; }

 private:
  int64_t left_;
  bool whole_;
  std::vector<uint8_t> all_;
};

// A stop string that might have come keeps nothing back.
TEST(EngineText, EndsWhereItsConstraintIsComplete) {
  for (const bool whole : {true, false}) {
    const Said said = say(bytes_of("{1}2345"), {"}x"}, true, 0, std::make_shared<UpTo>(3, whole));
    EXPECT_EQ(said.text, "{1}");
    EXPECT_EQ(said.finish, whole ? FinishReason::kStop : FinishReason::kLength);
  }
  const Said last = say(bytes_of("{1}"), {}, true, 0, std::make_shared<UpTo>(3, true));
  EXPECT_EQ(last.finish, FinishReason::kStop);
}

// Wherever a request ends within a window, nothing behind that is handed out or kept.
TEST(EngineText, EndsWithinAWindowOfDrafts) {
  const std::string text = "abc abc abc abc abc abd abc abc";
  const std::vector<int32_t> ids = bytes_of(text);
  size_t cut = 0;
  for (const int64_t drafts : {1, 4, 9}) {
    for (const char* stop : {"d", "bc abd", "c abc abc abd", "abc abc abc abc", "xyz", "c"}) {
      const Said plain = say(ids, {stop}), drafted = say(ids, {stop}, true, drafts);
      EXPECT_EQ(drafted.text, plain.text) << stop;
      EXPECT_EQ(drafted.finish, plain.finish) << stop;
      EXPECT_EQ(drafted.tokens, plain.tokens) << stop;
      if (drafted.accepted.empty()) continue;
      EXPECT_EQ(drafted.accepted.back(), static_cast<int32_t>(drafted.last_step)) << stop;
      cut += drafted.last_step < static_cast<size_t>(drafts + 1);
    }
  }
  EXPECT_GT(cut, 0);
}

}  // namespace
}  // namespace replayssm
