#include "server/tool_grammar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/admits.h"
#include "server/api_error.h"
#include "server/json_grammar.h"

namespace replayssm::server {
namespace {

using testing::admits;

Json tool(const char* name, const char* parameters, bool strict = false) {
  Json function = {{"name", name}, {"strict", strict}};
  if (*parameters) function["parameters"] = Json::parse(parameters);
  return {{"type", "function"}, {"function", function}};
}

const Json& tools() {
  static const Json all = {tool("f", R"({"type": "object", "required": ["a"], "properties": {
          "a": {"$ref": "#/$defs/size"}, "b": {"type": "string", "pattern": "x"}},
          "$defs": {"size": {"type": "integer"}}})"),
                           tool("g", ""), tool("a \"b\"", R"({"type": "object"})")};
  return all;
}

// What the grammar admits, the parser tells as these calls and nothing else.
void expect_calls(const Grammar& grammar, const std::string& text,
                  const std::vector<std::pair<std::string, std::string>>& expected) {
  EXPECT_TRUE(admits(grammar, text)) << text;
  ToolCallParser parser;
  EXPECT_EQ(parser.push(text) + parser.finish(), "");
  std::vector<std::pair<std::string, std::string>> calls;
  for (const ToolCall& call : parser.calls()) calls.emplace_back(call.name, call.arguments);
  EXPECT_EQ(calls, expected) << text;
}

TEST(ToolGrammar, AdmitsCallsInTheModelsNotation) {
  const auto objects = tool_grammar(tools(), ToolNotation::kObject, true);
  expect_calls(*objects, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 5}}\n</tool_call>",
               {{"f", R"({"a":5})"}});
  expect_calls(*objects,
               "<tool_call>\n{\"name\": \"g\", \"arguments\": {\"z\":[1]}}\n</tool_call>\n"
               "<tool_call>\n{\"name\": \"a \\\"b\\\"\", \"arguments\": {}}\n</tool_call>",
               {{"g", R"({"z":[1]})"}, {"a \"b\"", "{}"}});

  const auto tagged = tool_grammar(tools(), ToolNotation::kTagged, true);
  expect_calls(*tagged,
               "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\n\"6\"\n"
               "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n"
               "</tool_call>",
               {{"f", R"({"a":5,"b":"6"})"}, {"g", "{}"}});

  const auto list = tool_grammar(tools(), ToolNotation::kList, true);
  expect_calls(*list,
               R"(<TOOLCALL>[{"name": "f", "arguments": {"a":1, "b":"x"}}, )"
               R"({"name": "g", "arguments": {}}]</TOOLCALL>)",
               {{"f", R"({"a":1,"b":"x"})"}, {"g", "{}"}});
}

TEST(ToolGrammar, AdmitsNothingElse) {
  for (const bool several : {false, true}) {
    const auto grammar = tool_grammar(tools(), ToolNotation::kObject, several);
    const std::string one = "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
    EXPECT_TRUE(admits(*grammar, one));
    EXPECT_EQ(admits(*grammar, one + "\n" + one), several);
    for (const std::string& wrong :
         {std::string(), "x" + one, one + "x",
          std::string("<tool_call>\n{\"name\": \"h\", \"arguments\": {}}\n</tool_call>"),
          std::string("<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>"),
          std::string(
              "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"5\"}}\n</tool_call>")})
      EXPECT_FALSE(admits(*grammar, wrong)) << wrong;
  }
}

TEST(ToolGrammar, OrAnAnswerOfAFormat) {
  const auto calls = tool_grammar(tools(), ToolNotation::kObject, false);
  const auto format = schema_grammar(Json::parse(R"({"type": "object", "required": ["a"],
      "properties": {"a": {"type": "array", "items": {"type": "integer"}}}})"));
  const Grammar both = either(*format, *calls);
  for (const char* text :
       {R"({"a": [1, 2]})", "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
        R"({"a": ["b"]})", R"({"name": "g", "arguments": {}})", "<tool_call>\n",
        "<tool_call>\n{\"a\": [1]}\n</tool_call>", ""}) {
    EXPECT_EQ(admits(both, text), admits(*format, text) || admits(*calls, text)) << text;
  }
  EXPECT_TRUE(admits(both, R"({"a": [1, 2]})"));
  expect_calls(both, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 5}}\n</tool_call>",
               {{"f", R"({"a":5})"}});
}

TEST(ToolGrammar, RefusesWhatItCannotPromise) {
  const auto refused = [](const Json& wrong, const char* message) {
    for (const ToolNotation notation : {ToolNotation::kObject, ToolNotation::kTagged}) {
      try {
        tool_grammar(Json::array({wrong}), notation, false);
        ADD_FAILURE() << wrong;
      } catch (const ApiError& error) {
        EXPECT_EQ(error.status, 400);
        EXPECT_THAT(error.what(), ::testing::HasSubstr(message));
      }
    }
  };
  refused(
      tool("f", R"({"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}})",
           true),
      "tools: the keyword pattern");
  refused(tool("f", R"({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}})"),
          "tools: $ref");
  refused(tool(std::string(300, 'f').c_str(), ""), "at most 256 bytes");
  Json large = tool("f", R"({"type": "object", "properties": {}})");
  large["function"]["parameters"]["properties"][std::string(1 << 19, 'a')] = {{"type", "null"}};
  refused(large, "tools: expected a smaller schema");
}

}  // namespace
}  // namespace replayssm::server
