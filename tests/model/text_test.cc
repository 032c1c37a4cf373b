#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "model/text/bpe.h"
#include "model/text/byte_alphabet.h"
#include "model/text/json_field.h"
#include "model/text/normalizer.h"
#include "model/text/regex.h"
#include "model/text/utf8.h"
#include "replayssm/error.h"

namespace replayssm::text {
namespace {

struct Pair {
  const char* input;
  const char* expected;
};

class Utf8 : public testing::TestWithParam<Pair> {};

TEST_P(Utf8, BecomesReplacementCharactersPerMaximalSubpart) {
  EXPECT_EQ(to_valid_utf8(GetParam().input), GetParam().expected);
}

// The cases of the Unicode standard's table of maximal subparts, and their like.
INSTANTIATE_TEST_SUITE_P(
    Bytes, Utf8,
    testing::Values(Pair{"abc", "abc"}, Pair{"\xC3\xA9", "\u00E9"}, Pair{"\xF0\x9F\x99\x82", "🙂"},
                    Pair{"\x80", "\uFFFD"}, Pair{"\xC0\x80", "\uFFFD\uFFFD"},
                    Pair{"\xE2\x82", "\uFFFD"}, Pair{"\xE2\x82z", "\uFFFDz"},
                    Pair{"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"}, Pair{"\xF0\x9F\x99", "\uFFFD"},
                    Pair{"\xF4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"},
                    Pair{"\xF0\x80\x80", "\uFFFD\uFFFD\uFFFD"}, Pair{"\xFF\xFE", "\uFFFD\uFFFD"},
                    Pair{"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF", "\uFFFD\uFFFD\uFFFD\uFFFD"}));

TEST(Utf8Prefix, KeepsBackOnlyWhatMayBecomeACharacter) {
  EXPECT_EQ(complete_utf8_prefix("a\xE2\x82"), 1u);
  EXPECT_EQ(complete_utf8_prefix("a\xF0\x9F\x99"), 1u);
  EXPECT_EQ(complete_utf8_prefix("a\xED\xA0"), 3u);
  EXPECT_EQ(complete_utf8_prefix("\xC3\xA9"), 2u);
  EXPECT_EQ(complete_utf8_prefix("\x80\x80"), 2u);
  EXPECT_EQ(complete_utf8_prefix(""), 0u);
}

TEST(ByteAlphabet, IsABijection) {
  const std::array<char32_t, 256> alphabet = byte_alphabet();
  EXPECT_EQ(alphabet['A'], U'A');
  EXPECT_EQ(alphabet[' '], U'\u0120');
  std::string token;
  for (char32_t character : alphabet) append_utf8(token, character);
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes.push_back(static_cast<char>(byte));
  EXPECT_EQ(spelled_bytes(token), bytes);
  EXPECT_EQ(spelled_bytes("日"), std::nullopt);
  EXPECT_EQ(spelled_bytes(" "), std::nullopt);
}

class Nfc : public testing::TestWithParam<Pair> {};

TEST_P(Nfc, IsTheComposedForm) { EXPECT_EQ(normalize_nfc(GetParam().input), GetParam().expected); }

INSTANTIATE_TEST_SUITE_P(Texts, Nfc,
                         testing::Values(Pair{"e\u0301", "\u00E9"}, Pair{"\u212B", "\u00C5"},
                                         Pair{"a\u0301\u0323", "\u1EA1\u0301"},
                                         Pair{"\u1112\u1161\u11AB", "\uD55C"},
                                         Pair{"\uFB01", "\uFB01"}, Pair{"\u0958", "\u0915\u093C"}));

TEST(Nfc, TakesNoQuadraticTimeForARunOfMarks) {
  std::string text = "a";
  for (int i = 0; i < 200'000; ++i) text += i % 2 == 0 ? "\u0315" : "\u0323";
  const auto start = std::chrono::steady_clock::now();
  const std::string normal = normalize_nfc(text);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_TRUE(normal.starts_with("\u1EA1\u0323"));
  EXPECT_TRUE(normal.ends_with("\u0315"));
}

struct PatternCase {
  const char* pattern;
  const char* text;
  size_t begin, end;
};

class OnigurumaPattern : public testing::TestWithParam<PatternCase> {};

TEST_P(OnigurumaPattern, MatchesAsThere) {
  const PatternCase& expected = GetParam();
  const Regex regex = Regex::from_oniguruma(expected.pattern);
  const auto match = Regex::Matcher(regex).search(expected.text, 0);
  ASSERT_TRUE(match.has_value());
  EXPECT_EQ(match->begin, expected.begin);
  EXPECT_EQ(match->end, expected.end);
}

INSTANTIATE_TEST_SUITE_P(
    Patterns, OnigurumaPattern,
    testing::Values(PatternCase{R"(\s+(?!\S))", "a  b", 1, 2},
                    PatternCase{R"(\S)", "\u180E", 0, 3},  // no white space in Unicode
                    PatternCase{R"([^\s])", "\u0085\u00A0x", 4, 5},
                    PatternCase{R"(\p{N}{1,3}+)", "12345", 0, 5},  // repeats, is not possessive
                    PatternCase{R"(\p{N}{1,3})", "12345", 0, 3},
                    PatternCase{R"((?i:'s))", "'\u017F", 0, 3},
                    PatternCase{R"(\h+)", "xyzabf0", 3, 7}, PatternCase{R"(b$)", "ab\nc", 1, 2}));

TEST(OnigurumaPattern, RefusesWhatPcre2WouldReadDifferently) {
  for (const char* pattern : {R"([a&&[b]])", R"([a[b]])", R"(a{3,4}+)", R"([\W])", "(", R"(\)"}) {
    EXPECT_THROW(Regex::from_oniguruma(pattern), Error) << pattern;
  }
}

// Byte-pair encoding as its definition has it: the lowest rank, the leftmost, one at a time.
std::vector<int32_t> merge_by_definition(
    std::vector<int32_t> symbols,
    const std::map<std::pair<int32_t, int32_t>, std::pair<int, int32_t>>& merges) {
  while (true) {
    int best_rank = -1;
    size_t best = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto merge = merges.find({symbols[i], symbols[i + 1]});
      if (merge == merges.end()) continue;
      if (best_rank < 0 || merge->second.first < best_rank) {
        best_rank = merge->second.first;
        best = i;
      }
    }
    if (best_rank < 0) return symbols;
    symbols[best] = merges.at({symbols[best], symbols[best + 1]}).second;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

class RandomBpe : public testing::TestWithParam<int> {};

TEST_P(RandomBpe, MergesByTheDefinition) {
  std::mt19937 random(static_cast<unsigned>(GetParam()));
  std::vector<std::string> tokens = {"a", "b", "c"};
  std::map<std::string, int32_t> ids = {{"a", 0}, {"b", 1}, {"c", 2}};
  nlohmann::json list = nlohmann::json::array();
  std::map<std::pair<int32_t, int32_t>, std::pair<int, int32_t>> merges;
  while (list.size() < 40) {
    const std::string left = tokens[random() % tokens.size()];
    const std::string right = tokens[random() % tokens.size()];
    if (merges.contains({ids[left], ids[right]})) continue;
    const auto [merged, added] = ids.emplace(left + right, static_cast<int32_t>(ids.size()));
    if (added) tokens.push_back(left + right);
    merges[{ids[left], ids[right]}] = {static_cast<int>(list.size()), merged->second};
    list.push_back(left + " " + right);
  }
  const nlohmann::json model = {{"type", "BPE"}, {"vocab", ids}, {"merges", list}};
  const Bpe bpe(JsonField(model, "model"));
  for (size_t length : {1, 2, 5, 20, 47, 48, 49, 50, 100, 300}) {
    std::string piece;
    std::vector<int32_t> symbols;
    for (size_t i = 0; i < length; ++i) {
      symbols.push_back(static_cast<int32_t>(random() % 3));
      piece += tokens[static_cast<size_t>(symbols.back())];
    }
    std::vector<int32_t> got;
    bpe.encode(piece, got);
    EXPECT_EQ(got, merge_by_definition(symbols, merges)) << piece;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomBpe, testing::Range(0, 30));

}  // namespace
}  // namespace replayssm::text
