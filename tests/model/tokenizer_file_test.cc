// Files that tokenizer.json may be, good and bad.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
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
using testing::Not;
using testing::ThrowsMessage;

// Bytes a, b, c and the space; merges ab, abc and " a".
json small_tokenizer() {
  return json::parse(R"({
    "version": "1.0",
    "added_tokens": [{"id": 7, "content": "<s>", "special": true, "normalized": false},
                     {"id": 8, "content": "<x>", "special": false, "normalized": false}],
    "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
    "post_processor": null,
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "Ġ": 3, "ab": 4, "abc": 5, "Ġa": 6},
              "merges": ["a b", ["ab", "c"], "Ġ a"]}
  })");
}

Tokenizer load(const std::string& content) {
  const TemporaryFolder folder;
  folder.write("tokenizer.json", content);
  return Tokenizer(folder.path());
}

Tokenizer load_changed(const std::function<void(json&)>& change) {
  json root = small_tokenizer();
  change(root);
  return load(root.dump());
}

TEST(TokenizerFile, EncodesWithBothFormsOfMerges) {
  const Tokenizer tokenizer = load(small_tokenizer().dump());
  EXPECT_THAT(tokenizer.encode("abc ab<s>a <x>"), ElementsAre(5, 3, 4, 7, 0, 3, 8));
  EXPECT_EQ(tokenizer.size(), 9);
  EXPECT_EQ(tokenizer.token_id("<x>"), 8);
  EXPECT_EQ(tokenizer.token_id("abc"), 5);
  EXPECT_EQ(tokenizer.token_id("zz"), std::nullopt);
  EXPECT_EQ(tokenizer.token_bytes(6), " a");
  EXPECT_EQ(tokenizer.token_bytes(99), "");
  EXPECT_TRUE(tokenizer.is_special(7));
  EXPECT_FALSE(tokenizer.is_special(8));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{5, 7, 99, 8}), "abc<x>");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{5, 7, -1, 8}, false), "abc<s><x>");
}

TEST(TokenizerFile, IgnoresMergesForWholeTokens) {
  const auto with = [](bool ignore) {
    return load_changed([&](json& root) {
      root["model"]["vocab"]["cab"] = 9;
      root["model"]["ignore_merges"] = ignore;
    });
  };
  EXPECT_THAT(with(false).encode("cab"), ElementsAre(2, 4));
  EXPECT_THAT(with(true).encode("cab"), ElementsAre(9));
}

TEST(TokenizerFile, PostProcessorAddsItsTokensOnRequest) {
  const Tokenizer tokenizer = load_changed([](json& root) {
    root["post_processor"] = json::parse(R"({"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
      "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}}})");
  });
  EXPECT_THAT(tokenizer.encode("a"), ElementsAre(7, 0));
  EXPECT_THAT(tokenizer.encode("a", false), ElementsAre(0));
  EXPECT_THAT(tokenizer.encode(""), ElementsAre(7));
}

TEST(TokenizerFile, StreamsWholeCharactersOnly) {
  const Tokenizer tokenizer = load_changed([](json& root) {
    // The bytes F0 9F 99 82 and C3.
    for (const char* token : {"ð", "Ł", "Ļ", "Ĥ", "Ã"}) {
      root["model"]["vocab"][token] = root["model"]["vocab"].size() + 10;
    }
  });
  StreamDecoder stream(tokenizer);
  EXPECT_EQ(stream.push(17), "");
  EXPECT_EQ(stream.push(18), "");
  EXPECT_EQ(stream.push(19), "");
  EXPECT_EQ(stream.push(20), "🙂");
  EXPECT_EQ(stream.push(21), "");
  EXPECT_EQ(stream.push(7), "");
  EXPECT_EQ(stream.push(0), "\uFFFDa");
  EXPECT_EQ(stream.push(17), "");
  EXPECT_EQ(stream.flush(), "\uFFFD");
  EXPECT_EQ(stream.flush(), "");
}

TEST(TokenizerFile, TakesAMegabyteOfOneCharacter) {
  const Tokenizer tokenizer = load_changed([](json& root) {
    root["model"]["vocab"]["ĠĠ"] = 9;
    root["model"]["merges"].push_back("Ġ Ġ");
  });
  for (const char* unit : {" ", "a", "b", "\n"}) {
    std::string text;
    for (int i = 0; i < 1 << 20; ++i) text += unit;
    const size_t expected = *unit == ' ' ? text.size() / 2 : *unit == '\n' ? 0 : text.size();
    EXPECT_EQ(tokenizer.encode(text).size(), expected) << unit;
  }
}

struct BadFile {
  const char* name;
  std::function<void(json&)> change;
  const char* message;
};

class MalformedTokenizer : public testing::TestWithParam<BadFile> {};

TEST_P(MalformedTokenizer, IsRefusedInOneLine) {
  EXPECT_THAT([] { load_changed(GetParam().change); },
              ThrowsMessage<Error>(AllOf(HasSubstr("tokenizer.json"), HasSubstr(GetParam().message),
                                         Not(HasSubstr("\n")))));
}

INSTANTIATE_TEST_SUITE_P(
    Files, MalformedTokenizer,
    testing::Values(
        BadFile{"no_model", [](json& r) { r.erase("model"); }, "\"model\""},
        BadFile{"no_merges", [](json& r) { r["model"].erase("merges"); }, "\"merges\""},
        BadFile{"merges_type", [](json& r) { r["model"]["merges"] = "a b"; },
                "model.merges: expected an array, got string"},
        BadFile{"merge_type", [](json& r) { r["model"]["merges"] = {1}; }, "model.merges[0]"},
        BadFile{"merge_parts", [](json& r) { r["model"]["merges"] = {"a b c"}; }, "merges[0]"},
        BadFile{"unknown_half", [](json& r) { r["model"]["merges"] = {"a z"}; },
                "\"z\" is not in the vocabulary"},
        BadFile{"unknown_result", [](json& r) { r["model"]["merges"] = {"b a"}; },
                "\"ba\" is not in the vocabulary"},
        BadFile{"no_vocab", [](json& r) { r["model"].erase("vocab"); }, "\"vocab\""},
        BadFile{"empty_vocab", [](json& r) { r["model"]["vocab"] = json::object(); },
                "model.vocab"},
        BadFile{"negative_id", [](json& r) { r["model"]["vocab"]["a"] = -1; }, "got -1"},
        BadFile{"huge_id", [](json& r) { r["model"]["vocab"]["a"] = 2147483647; }, "2147483647"},
        BadFile{"float_id", [](json& r) { r["model"]["vocab"]["a"] = 1.5; }, "got 1.5"},
        BadFile{"same_id", [](json& r) { r["model"]["vocab"]["a"] = 1; }, "have the id 1"},
        BadFile{"unigram", [](json& r) { r["model"]["type"] = "Unigram"; }, "\"Unigram\""},
        BadFile{"affix", [](json& r) { r["model"]["end_of_word_suffix"] = "</w>"; },
                "end_of_word_suffix"},
        BadFile{"dropout", [](json& r) { r["model"]["dropout"] = 0.1; }, "dropout"},
        BadFile{"unknown_token", [](json& r) { r["model"]["unk_token"] = "?"; }, "unk_token"},
        BadFile{"byte_fallback", [](json& r) { r["model"]["byte_fallback"] = true; },
                "byte_fallback"},
        BadFile{"normalizer", [](json& r) { r["normalizer"] = {{"type", "Lowercase"}}; },
                "unsupported normalizer \"Lowercase\""},
        BadFile{"no_pre_tokenizer", [](json& r) { r["pre_tokenizer"] = nullptr; }, "ByteLevel"},
        BadFile{"pre_tokenizer", [](json& r) { r["pre_tokenizer"]["type"] = "Metaspace"; },
                "unsupported pre-tokenizer \"Metaspace\""},
        BadFile{"pattern",
                [](json& r) {
                  r["pre_tokenizer"] = {
                      {"type", "Split"}, {"pattern", {{"Regex", "("}}}, {"behavior", "Isolated"}};
                },
                "pattern.Regex"},
        BadFile{"behavior",
                [](json& r) {
                  r["pre_tokenizer"] = {
                      {"type", "Split"}, {"pattern", {{"String", "x"}}}, {"behavior", "Gone"}};
                },
                "unknown behavior \"Gone\""},
        BadFile{"decoder", [](json& r) { r["decoder"]["type"] = "WordPiece"; }, "\"WordPiece\""},
        BadFile{"no_decoder", [](json& r) { r["decoder"] = nullptr; }, "decoder"},
        BadFile{"post_processor",
                [](json& r) { r["post_processor"] = {{"type", "BertProcessing"}}; },
                "\"BertProcessing\""},
        BadFile{"version", [](json& r) { r["version"] = "2.0"; }, "\"2.0\""},
        BadFile{"added_type", [](json& r) { r["added_tokens"] = 3; }, "got 3"},
        BadFile{"added_flag", [](json& r) { r["added_tokens"][0]["lstrip"] = "yes"; },
                "added_tokens[0].lstrip"},
        BadFile{"root", [](json& r) { r = json::array(); }, "expected an object"}),
    [](const auto& info) { return info.param.name; });

TEST(TokenizerFile, RefusesWhatIsNoJson) {
  const std::string good = small_tokenizer().dump();
  for (const std::string& content : {std::string(), good.substr(0, good.size() / 2), good + "}",
                                     std::string("{\"a\": \"\xff\"}"), std::string(100'000, '['),
                                     std::string(5000, '[') + std::string(5000, ']')}) {
    EXPECT_THAT([&] { load(content); }, ThrowsMessage<Error>(HasSubstr("tokenizer.json")));
  }
  EXPECT_THAT([] { Tokenizer("/nonexistent"); },
              ThrowsMessage<Error>(HasSubstr("/nonexistent/tokenizer.json: no such file")));
}

}  // namespace
}  // namespace replayssm
