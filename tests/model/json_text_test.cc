#include "model/json_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.h"
#include "model/folders.h"

namespace replayssm::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(JsonText, TagsBareFloatsOutsideStringsOnly) {
  const std::string infinity = R"({"__float__":"Infinity"})";
  const std::pair<std::string, std::string> cases[] = {
      {"[0.0, Infinity]", "[0.0, " + infinity + "]"},
      {"{\"a\":-Infinity}", R"({"a":{"__float__":"-Infinity"}})"},
      {"{\"a\":NaN,\"b\":Infinity}", R"({"a":{"__float__":"NaN"},"b":)" + infinity + "}"},
      {R"({"a":"x Infinity NaN"})", R"({"a":"x Infinity NaN"})"},
      {R"({"a\"Infinity":"\\","b":NaN})", R"({"a\"Infinity":"\\","b":{"__float__":"NaN"}})"},
      {R"({"NaN":1})", R"({"NaN":1})"},
      {"[Infinityx, xNaN, NaN0]", "[Infinityx, xNaN, NaN0]"},
      {infinity, infinity},
      {"Infinity", infinity},
      {"\"Infinity", "\"Infinity"},
      {"", ""},
      {"\"\\", "\"\\"},
  };
  for (const auto& [text, want] : cases) EXPECT_EQ(with_tagged_floats(text), want);
}

TEST(JsonText, RefusesInOneLine) {
  const std::string deep = "{\"a\":" + std::string(100000, '[');
  const std::pair<std::string, std::string> cases[] = {
      {"", "malformed JSON"},
      {"{", "malformed JSON"},
      {"{\"a\":1}}", "malformed JSON"},
      {"{\"a\":\"\n\"}", "malformed JSON"},
      {"{\"a\":\"\xff\xfe\"}", "malformed JSON"},
      {"{\"a\":" + std::string(5000, 'x'), "malformed JSON"},
      {"[1]", "expected a JSON object, got a list of 1"},
      {"3", "expected a JSON object, got 3"},
      {R"({"a":1,"b":{"c":1,"c":2}})", "key \"c\" occurs twice"},
      {R"({"a":1,"a":1})", "key \"a\" occurs twice"},
      {R"({"a\nb":1,"a\nb":1})", "key \"a?b\" occurs twice"},
      {deep, "nested deeper than"},
  };
  for (const auto& [text, words] : cases) {
    const std::string error = error_of([&] { parse_json_object(text, "x.json"); });
    EXPECT_THAT(error, HasSubstr("x.json: "));
    EXPECT_THAT(error, HasSubstr(words));
    EXPECT_THAT(error, Not(HasSubstr("\n")));
    EXPECT_LT(error.size(), 400);
  }
}

TEST(JsonText, HandsMembersOver) {
  json seen = json::object();
  const auto take = [&](const std::string& key, json&& value) { seen[key] = std::move(value); };
  parse_json_object(R"({"a":{"b":[1,{"c":2}]},"d":3,"e":[4],"f":{}})", "x", take);
  EXPECT_EQ(seen, json::parse(R"({"a":{"b":[1,{"c":2}]},"d":3,"e":[4],"f":{}})"));
}

TEST(JsonText, QuotesStayShortAndWhole) {
  EXPECT_EQ(in_quotes("a\tb\x7f"), "\"a?b?\"");
  std::string umlauts;
  for (int i = 0; i < 200; ++i) umlauts += "\xc3\xa4";
  for (const std::string& text : {umlauts, "x" + umlauts}) {
    const std::string quoted = in_quotes(text);
    EXPECT_LT(quoted.size(), 130);
    EXPECT_NO_THROW(json(quoted).dump());  // valid UTF-8
  }
}

}  // namespace
}  // namespace replayssm::testing
