#include "server/tool_calls.h"

#include <gtest/gtest.h>

#include <utility>

#include "server/access.h"

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
      {"<tool_call>{\"name\":\"f\"}</tool_call>\n \n<tool_call>{\"name\":\"g\"}</tool_call>\n",
       {"", {{"f", "{}"}, {"g", "{}"}}}},
      {"<tool_call>{\"name\":\"f\"}</tool_call>\n\ntext  \n", {"text  \n", {{"f", "{}"}}}},
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

TEST(ToolNotation, IsThatOfTheTemplate) {
  EXPECT_EQ(tool_notation("{{ '<tool_call>' }}"), ToolNotation::kObject);
  EXPECT_EQ(tool_notation(""), ToolNotation::kObject);
  EXPECT_EQ(tool_notation("<tool_call>\n<function=' ~ name ~ '>"), ToolNotation::kTagged);
  EXPECT_EQ(tool_notation("<TOOLCALL>["), ToolNotation::kList);
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
