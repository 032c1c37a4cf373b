// tiktoken.model and the special tokens beside it: what loads and what is refused. Against tiktoken
// itself: differential_tiktoken.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "model/temporary_folder.h"
#include "model/tokenizer.h"
#include "replayssm/error.h"

namespace replayssm {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t j = 0; j < 3; ++j) {
      bits = bits << 8 | (i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0u);
    }
    for (size_t j = 0; j < 4; ++j) {
      text += i + j <= bytes.size() ? kDigits[bits >> (18 - 6 * j) & 63] : '=';
    }
  }
  return text;
}

// Every byte as its own id, then `tokens`.
std::string ranks(const std::vector<std::string>& tokens) {
  std::string file;
  for (int byte = 0; byte < 256; ++byte) {
    file += base64(std::string(1, static_cast<char>(byte))) + ' ' + std::to_string(byte) + '\n';
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    file += base64(tokens[i]) + ' ' + std::to_string(256 + i) + '\n';
  }
  return file;
}

Tokenizer load(const std::string& file, const json& config) {
  const TemporaryFolder folder;
  folder.write("tiktoken.model", file);
  folder.write("tokenizer_config.json", config.dump());
  return Tokenizer(folder.path());
}

json named(int32_t id, const std::string& content) {
  return {{"added_tokens_decoder", {{std::to_string(id), {{"content", content}}}}}};
}

// 256 ids of bytes, "ab" = 256, "bc" = 257, "abc" = 258, "中" = 259; specials from 260 on.
Tokenizer small() { return load(ranks({"ab", "bc", "abc", "中"}), named(262, "<|im_end|>")); }

TEST(Tiktoken, MergesByRankAndKeepsWholePieces) {
  const Tokenizer tokenizer = small();
  EXPECT_EQ(tokenizer.size(), 260 + 256);
  EXPECT_THAT(tokenizer.encode("abc"), ElementsAre(258));
  EXPECT_THAT(tokenizer.encode("xabcb"), ElementsAre('x', 258, 'b'));
  EXPECT_THAT(tokenizer.encode("bcab"), ElementsAre(257, 256));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{258, ' ', 259}), "abc 中");
}

TEST(Tiktoken, HanRunsAreTheirOwnPieces) {
  const Tokenizer tokenizer = load(ranks({"中a", "a中", "中"}), json::object());
  EXPECT_THAT(tokenizer.encode("a中a"), ElementsAre('a', 258, 'a'));
}

TEST(Tiktoken, SpecialTokens) {
  const Tokenizer tokenizer = small();
  EXPECT_THAT(tokenizer.encode("ab<|im_end|>ab"), ElementsAre(256, 262, 256));
  EXPECT_THAT(tokenizer.encode("<|reserved_token_261|>"), ElementsAre(261));
  EXPECT_EQ(tokenizer.token_id("<|im_end|>"), 262);
  EXPECT_TRUE(tokenizer.is_special(262));
  EXPECT_TRUE(tokenizer.is_special(515));
  EXPECT_FALSE(tokenizer.is_special(259));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{256, 262}, true), "ab");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{256, 262}, false), "ab<|im_end|>");
}

TEST(Tiktoken, TokenizerJsonComesFirst) {
  const TemporaryFolder folder;
  folder.write("tiktoken.model", ranks({}));
  folder.write("tokenizer_config.json", "{}");
  folder.write("tokenizer.json", "{}");
  EXPECT_THAT([&] { Tokenizer(folder.path()); }, ThrowsMessage<Error>(HasSubstr("tokenizer.json")));
}

TEST(Tiktoken, BadFilesAreRefused) {
  const std::string good = ranks({"ab"});
  const std::pair<std::string, const char*> cases[] = {
      {"", "token for every single byte, got none for byte 0"},
      {good.substr(good.find('\n') + 1), "ranks from 0 to 255, got 256"},
      {good + "YWI= 258\n", "line 258: the token is there twice"},
      {good + "YWJj 258\n", "ranks from 0 to 257, got 258"},
      {good + "YWJj 3\n", "line 258: the rank 3 is there twice"},
      {good + "YWJj\n", "line 258: expected a token in base64, a space and its rank"},
      {good + "YWJj -1\n", "line 258: expected"},
      {good + "YWJj 257x\n", "line 258: expected"},
      {good + "YWJj 99999999999\n", "line 258: expected"},
      {good + "YWJ 257\n", "line 258: expected"},
      {good + "Y!Jj 257\n", "line 258: expected"},
      {good + "==== 257\n", "line 258: expected"},
      {good + " 257\n", "line 258: expected"},
  };
  for (const auto& [file, words] : cases) {
    EXPECT_THAT([&] { load(file, json::object()); },
                ThrowsMessage<Error>(AllOf(HasSubstr("tiktoken.model: "), HasSubstr(words))));
  }
}

TEST(Tiktoken, BadSpecialTokensAreRefused) {
  const std::pair<json, const char*> cases[] = {
      {named(256, "<a>"), "expected ids from 257 to 512"},
      {named(513, "<a>"), "expected ids from 257 to 512"},
      {{{"added_tokens_decoder", json::array()}}, "expected an object"},
      {{{"added_tokens_decoder", {{"x", {{"content", "<a>"}}}}}}, "expected ids from"},
      {named(300, "<|reserved_token_301|>"), "two tokens stand for"},
      {{{"tokenizer_class", "QWenTokenizer"}}, "expected \"TikTokenTokenizer\""},
  };
  for (const auto& [config, words] : cases) {
    EXPECT_THAT(
        [&] { load(ranks({"ab"}), config); },
        ThrowsMessage<Error>(AllOf(HasSubstr("tokenizer_config.json: "), HasSubstr(words))));
  }
  const TemporaryFolder folder;
  folder.write("tiktoken.model", ranks({}));
  EXPECT_THAT([&] { Tokenizer(folder.path()); },
              ThrowsMessage<Error>(HasSubstr("tokenizer_config.json")));
}

}  // namespace
}  // namespace replayssm
