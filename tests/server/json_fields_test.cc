#include "server/json_fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "server/api_error.h"

namespace replayssm::server {
namespace {

void expect_refused(const std::string& body, const char* message) {
  try {
    parse_body(body);
    ADD_FAILURE() << body.substr(0, 60);
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 400);
    EXPECT_THAT(error.what(), ::testing::HasSubstr(message)) << body.substr(0, 60);
  }
}

std::string members(int count) {
  std::string body = "{";
  for (int i = 0; i < count; ++i) body += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":[0,{}]";
  return body + "}";
}

TEST(Body, IsRefusedWhereItIsNoRequest) {
  expect_refused("", "malformed at byte");
  expect_refused("[]", "a JSON object");
  expect_refused("{\"a\": \"\xff\"}", "malformed at byte");
  expect_refused("{\"a\": 1e400}", "range of a double");
  expect_refused("{\"a\": [-1e400]}", "range of a double");
  expect_refused(std::string(100000, '['), "at most 64 deep");
  expect_refused("{\"a\":" + std::string(64, '[') + std::string(64, ']') + "}", "at most 64 deep");
  expect_refused("}}]]{\"a\":", "malformed at byte");
  expect_refused(members(1025), "at most 1024 members");
  expect_refused("{\"a\": [" + members(1025), "at most 1024 members");
  EXPECT_EQ(parse_body(members(1024)).size(), 1024);
  const Json deep = parse_body("{\"a\":" + std::string(63, '[') + std::string(63, ']') + "}");
  EXPECT_TRUE(deep["a"].is_array());
  // Brackets and commas of texts do not count, nor do the items of lists.
  EXPECT_EQ(parse_body(R"({"a": "\"[[[[,,,,"})").size(), 1);
  std::string list = "{\"a\": [0";
  for (int i = 0; i < 5000; ++i) list += ",0";
  EXPECT_EQ(parse_body(list + "]}")["a"].size(), 5001);
}

TEST(EmbeddedJson, IsDiscardedWhereABodyWouldBeRefused) {
  EXPECT_EQ(parse_embedded("{\"a\": 1}")["a"], 1);
  for (const std::string& text : {std::string("{"), std::string("{\"a\": 1e400}"), members(1025),
                                  "{\"a\":" + std::string(1 << 20, '[')}) {
    EXPECT_TRUE(parse_embedded(text).is_discarded()) << text.substr(0, 60);
  }
}

TEST(AppendQuoted, IsWhatParsesBack) {
  for (const std::string text : {"", "plain", "a\"b\\c\n\t\x01\x7f", "naïve 日本 🙂"}) {
    std::string quoted;
    append_quoted(quoted, text);
    EXPECT_EQ(Json::parse(quoted).get<std::string>(), text);
  }
}

TEST(Fields, WholeNumbersAreExact) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto read = [](const char* text, int64_t low, int64_t high) {
    const Json object = {{"a", Json::parse(text)}};
    return Fields(object).integer("a", low, high);
  };
  EXPECT_EQ(read("9223372036854775807", -kMost, kMost), kMost);
  EXPECT_EQ(read("-9223372036854775807", -kMost, kMost), -kMost);
  EXPECT_EQ(read("4.0", 0, 9), 4);
  EXPECT_EQ(read("1e3", 0, 1000), 1000);
  for (const char* text : {"9223372036854775808", "18446744073709551615", "-9223372036854775808",
                           "9.3e18", "1.5", "\"1\"", "true", "1e300"}) {
    EXPECT_THROW(read(text, -kMost, kMost), ApiError) << text;
  }
  EXPECT_THROW(read("10", 0, 9), ApiError);
  EXPECT_THROW(read("-1", 0, 9), ApiError);
}

}  // namespace
}  // namespace replayssm::server
