#include "server/json_grammar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/philox.h"
#include "engine/admits.h"
#include "server/api_error.h"

namespace replayssm::server {
namespace {

using testing::admits;

struct Case {
  const char* schema;
  std::vector<std::string> right, wrong;
};

TEST(SchemaGrammar, AdmitsWhatTheSchemaDescribes) {
  const std::vector<Case> cases = {
      {R"({"type": "integer"})", {"0", "-7", "120"}, {"01", "1.5", "", "--1", "\"1\""}},
      {R"({"type": "number"})", {"0.25", "-1e5", "3"}, {".5", "1.", "1e"}},
      {R"({"type": ["boolean", "null"]})", {"true", "false", "null"}, {"nul", "0"}},
      {R"({"type": "string"})",
       {R"("")", R"("a\n\u00e9 日本🙂")"},
       {"\"", R"("\x")", "\"\n\"", "\"\xff\"", "\"\xed\xa0\x80\"", R"("\ud800")"}},
      {R"({"type": "string", "minLength": 2, "maxLength": 3})",
       {R"("ab")", R"("日本語")"},
       {R"("a")", R"("abcd")"}},
      {R"({"enum": ["a", 1, null]})", {R"("a")", "1", "null"}, {"2", "a"}},
      {R"({"const": {"a": [1]}})", {R"({"a":[1]})"}, {R"({"a":[2]})"}},
      {R"({"type": "array", "items": {"type": "integer"}})",
       {"[]", "[1]", "[1, 2,3]", "[ 1,\n  2]"},
       {"[1,]", "[,1]", "[\"a\"]", "[1"}},
      {R"({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2})",
       {"[null]", "[null,null]"},
       {"[]", "[null,null,null]"}},
      {R"({"type": "array", "items": {"const": 1}, "minItems": 2})",
       {"[1,1]", "[1,1,1,1]"},
       {"[]", "[1]"}},
      {R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"},
          "c": {"type": "integer"}}, "required": ["b"], "additionalProperties": false})",
       {R"({"b":1})", R"({"a": 1, "b": 2})", R"({"b":1,"c":2})", R"({ "a":1,"b":2,"c":3 })"},
       {"{}", R"({"a":1})", R"({"b":1,"a":2})", R"({"b":1,})", R"({,"b":1})", R"({"b":1,"d":2})"}},
      {R"({"type": "object", "additionalProperties": {"type": "integer"}})",
       {"{}", R"({"x":1,"y":2})"},
       {R"({"x":"1"})"}},
      {R"({"anyOf": [{"type": "integer"}, {"type": "object", "properties": {}}]})",
       {"1", "{}", R"({"x":[true]})"},
       {"[]"}},
      {R"({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "required": ["next"],
          "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}}})",
       {R"({"next":null})", R"({"next":{"next":{"next":null}}})"},
       {R"({"next":{}})", "null"}},
  };
  for (const auto& [schema, right, wrong] : cases) {
    const auto grammar = schema_grammar(Json::parse(schema));
    for (const std::string& text : right) EXPECT_TRUE(admits(*grammar, text)) << schema << text;
    for (const std::string& text : wrong) EXPECT_FALSE(admits(*grammar, text)) << schema << text;
  }
  const auto any = any_object_grammar();
  EXPECT_TRUE(admits(*any, R"({"a": [1, {"b": null}], "c": "d"})"));
  EXPECT_FALSE(admits(*any, "[]"));
}

TEST(SchemaGrammar, RefusesWhatItCannotPromise) {
  const auto refused = [](const char* schema, const char* message) {
    try {
      schema_grammar(Json::parse(schema));
      ADD_FAILURE() << schema;
    } catch (const ApiError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(message)) << schema;
      EXPECT_EQ(error.status, 400);
    }
  };
  refused(R"({"type": "string", "pattern": "a+"})", "keyword pattern");
  refused(R"({"type": "integer", "minimum": 3})", "keyword minimum");
  refused(R"({"type": "date"})", "got date");
  refused(R"({"$ref": "#/nowhere"})", "nothing at #/nowhere");
  refused(R"({"$ref": "#"})", "leads to itself");
  refused(R"({"anyOf": [{"$ref": "#"}, {"type": "null"}]})", "leads to itself");
  refused(R"({"enum": []})", "enum");
  refused(R"({"type": "object", "properties": {"a": {}}, "required": ["b"]})", "required");
  refused(R"({"type": "string", "maxLength": 100000})", "maxLength");
}

// {"anyOf": [{"$ref": next}, {"$ref": next}]}, and so on: `links` of them.
Json chain(int links) {
  Json definitions = Json::object();
  for (int i = 0; i < links; ++i) {
    const Json next = {{"$ref", concat("#/$defs/", i + 1)}};
    definitions[std::to_string(i)] = {{"anyOf", {next, next}}};
  }
  definitions[std::to_string(links)] = {{"type", "integer"}};
  return {{"$ref", "#/$defs/0"}, {"$defs", definitions}};
}

// What clients send must not keep the server busy or overflow its stack.
TEST(SchemaGrammar, WorkAndDepthAreBounded) {
  EXPECT_TRUE(admits(*schema_grammar(chain(40)), "17"));
  const auto refused = [](const Json& schema, const char* message) {
    try {
      schema_grammar(schema);
      ADD_FAILURE() << message;
    } catch (const ApiError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(message));
    }
  };
  refused(chain(500), "nested at most 100 deep");
  refused({{"const", std::string(1 << 20, 'x')}}, "smaller schema");
  refused({{"type", Json(std::vector<std::string>(1 << 17, "object"))}}, "smaller schema");
  Json wide = {{"type", "string"}, {"maxLength", 1000}};
  for (int i = 0; i < 8; ++i) wide = {{"anyOf", std::vector<Json>(4, wide)}};
  refused(wide, "smaller schema");

  Json many = Json::array();
  for (int i = 0; i < 5000; ++i) many.push_back("value " + std::to_string(i));
  const auto one = schema_grammar({{"type", "array"}, {"items", {{"enum", many}}}});
  EXPECT_TRUE(admits(*one, R"(["value 0", "value 4999"])"));
  EXPECT_FALSE(admits(*one, R"(["value 5000"])"));
  EXPECT_FALSE(admits(*one, R"(["value "])"));

  // Arrays of itself by two equal ways: every bracket would double the readings.
  const Json itself = {{"$ref", "#"}};
  const Json list = {{"type", "array"}, {"items", itself}};
  const auto grammar = schema_grammar({{"anyOf", {list, list, {{"type", "null"}}}}});
  EXPECT_TRUE(admits(*grammar, std::string(60, '[') + "null" + std::string(60, ']')));
  EXPECT_FALSE(admits(*grammar, std::string(60, '[') + "null" + std::string(59, ']')));
}

// Tokens drawn at random among those that are allowed: whatever comes out whole is what was asked
// for.
TEST(SchemaGrammar, RandomOutputsSatisfyTheSchema) {
  const Tokenizer tokenizer(std::string(REPLAYSSM_SOURCE_DIR) + "/models/tiny-qwen3.5");
  const auto vocabulary = std::make_shared<VocabularyTrie>(tokenizer, tokenizer.size());
  const Json schema =
      Json::parse(R"({"type": "object", "required": ["name", "tags"], "properties": {
      "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"},
      "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}}})");
  const auto grammar = schema_grammar(schema);
  int whole = 0;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    GrammarConstraint constraint(grammar, vocabulary, tokenizer);
    std::string text;
    for (int64_t step = 0; step < 60 && !constraint.complete(); ++step) {
      const auto allowed = constraint.allowed();
      std::vector<int32_t> ids;
      for (size_t id = 0; id < allowed.size(); ++id) {
        if (allowed[id] != 0) ids.push_back(static_cast<int32_t>(id));
      }
      ASSERT_FALSE(ids.empty()) << text;
      const auto at = static_cast<size_t>(uniform(seed, step) * static_cast<double>(ids.size()));
      constraint.accept(ids[at]);
      text += tokenizer.token_bytes(ids[at]);
    }
    if (!constraint.complete()) continue;
    ++whole;
    const Json value = Json::parse(text);
    EXPECT_TRUE(value.at("name").is_string());
    EXPECT_TRUE(!value.contains("age") || value["age"].is_number_integer());
    EXPECT_LE(value.at("tags").size(), 3);
    for (const Json& tag : value["tags"]) EXPECT_TRUE(tag == "red" || tag == "green");
  }
  EXPECT_GT(whole, 5);
}

}  // namespace
}  // namespace replayssm::server
