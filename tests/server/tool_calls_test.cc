#include "server/tool_calls.h"

#include <gtest/gtest.h>

#include <utility>

#include "server/access.h"
#include "server/api_error.h"
#include "server/json_fields.h"

namespace replayssm::server {
namespace {

struct Told {
  std::string text;
  std::vector<std::pair<std::string, std::string>> calls;
  bool operator==(const Told&) const = default;
};

// Pushed in pieces of `size` bytes.
Told tell(std::string_view text, size_t size) {
  ToolCallParser parser;
  Told told;
  for (size_t at = 0; at < text.size(); at += size) told.text += parser.push(text.substr(at, size));
  told.text += parser.finish();
  for (const ToolCall& call : parser.calls()) told.calls.emplace_back(call.name, call.arguments);
  return told;
}

TEST(ToolCalls, AreToldFromTextHoweverItIsCut) {
  const std::vector<std::pair<std::string, Told>> cases = {
      {"no call <tool> at all", {"no call <tool> at all", {}}},
      {R"(ok <tool_call>
{"name": "f", "arguments": {"a": [1, "x"]}}
</tool_call>)",
       {"ok ", {{"f", R"({"a":[1,"x"]})"}}}},
      {R"(<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>{"name":"g"}</tool_call>.)",
       {".", {{"f", "{}"}, {"g", "{}"}}}},
      {R"(<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</TOOLCALL>)",
       {"", {{"f", R"({"a":1})"}, {"g", "{}"}}}},
      {"<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\nsome "
       "text\n</parameter>\n</function>\n</tool_call>",
       {"", {{"f", R"({"a":5,"b":"some text"})"}}}},
      {R"(<tool_call>{"name": "f", "arguments": {}})", {"", {{"f", "{}"}}}},  // cut short
      {"<tool_call>not JSON</tool_call>", {"<tool_call>not JSON</tool_call>", {}}},
      {"<tool_call>{\"no\": \"name\"}</tool_call> x",
       {"<tool_call>{\"no\": \"name\"}</tool_call> x", {}}},
      {"ends with <tool_ca", {"ends with <tool_ca", {}}},
      {"<tool_call>", {"<tool_call>", {}}},
  };
  for (const auto& [text, expected] : cases) {
    for (const size_t size : {size_t{1}, size_t{2}, size_t{7}, text.size()}) {
      const Told told = tell(text, size);
      EXPECT_EQ(told.text, expected.text) << text << " by " << size;
      EXPECT_EQ(told.calls, expected.calls) << text << " by " << size;
    }
  }
}

TEST(JsonFields, QuoteWhatParsesBack) {
  for (const std::string text : {"", "plain", "a\"b\\c\n\t\x01\x7f", "naïve 日本 🙂"}) {
    std::string quoted;
    append_quoted(quoted, text);
    EXPECT_EQ(Json::parse(quoted).get<std::string>(), text);
  }
}

TEST(JsonFields, CountBracketsOutsideTexts) {
  EXPECT_NO_THROW(
      parse_body(R"({"a": "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["})"));
  EXPECT_NO_THROW(parse_body(R"({"a\"": "\\", "b": [1]})"));
  const std::string deep(65, '[');
  EXPECT_THROW(parse_body("{\"a\": " + deep + std::string(65, ']') + "}"), ApiError);
}

TEST(Access, TakesWholeKeysAlone) {
  const std::vector<std::string> keys = {"first", "second"};
  EXPECT_TRUE(is_authorized("", {}));
  EXPECT_TRUE(is_authorized("Bearer second", keys));
  for (const char* wrong : {"", "Bearer ", "Bearer firs", "Bearer first1", "first", "bearer first"})
    EXPECT_FALSE(is_authorized(wrong, keys)) << wrong;
}

}  // namespace
}  // namespace replayssm::server
