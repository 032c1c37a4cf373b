#include "model/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "model/temporary_folder.h"
#include "replayssm/error.h"

namespace replayssm {
namespace {

using Json = nlohmann::ordered_json;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::string render(const std::string& source, const Json& variables = Json::object()) {
  return ChatTemplate(source).render(variables);
}

struct Case {
  const char* source;
  const char* expected;
};

class Rendering : public testing::TestWithParam<Case> {};

TEST_P(Rendering, IsAsJinjaRenders) {
  const Json variables = {{"l", {3, 1, 2}},
                          {"d", {{"b", 1}, {"a", "x"}}},
                          {"s", "Hello"},
                          {"m", {{{"role", "user"}, {"n", 2}}, {{"role", "tool"}, {"n", 1}}}}};
  EXPECT_EQ(render(GetParam().source, variables), GetParam().expected) << GetParam().source;
}

INSTANTIATE_TEST_SUITE_P(
    WhiteSpace, Rendering,
    testing::Values(Case{"a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"},
                    Case{"a {%- if true -%} \n b {%- endif %} c", "ab c"},
                    Case{"  {%+ if true +%}\n{% endif %}", "  \n"}, Case{"  {{ 1 }}\n\n", "  1\n"},
                    Case{"x {#- c -#} \ny {# c #}\nz", "xy z"},
                    Case{"{% raw %} {{ x }} {% endraw %}!", " {{ x }} !"},
                    Case{"a\r\nb\rc", "a\nb\nc"}));

INSTANTIATE_TEST_SUITE_P(
    Expressions, Rendering,
    testing::Values(Case{"{{ 7 // -2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 3 }}", "-4 2 3.5 8"},
                    Case{"{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }}", "True False"},
                    Case{"{{ 'a' 'b' ~ 1 ~ none }}", "ab1None"},
                    Case{"{{ [1, 'a\\n', {'k': (1,)}, 1e20, 0.1] }}",
                         "[1, 'a\\n', {'k': (1,)}, 1e+20, 0.1]"},
                    Case{"{{ s[::-1] }} {{ s[1:-1] }} {{ l[-1] }} {{ s[9] }}", "olleH ell 2 "},
                    Case{"{{ 'x' if missing else 'y' }}{{ 'z' if missing }}", "y"},
                    Case{"{{ missing is undefined }} {{ d.zz is defined }}", "True False"},
                    Case{"{{ 1 in l and 'a' in d and 'z' not in d }}", "True"},
                    Case{"{{ -2 | abs }} {{ not 1 == 2 }}", "2 True"},
                    Case{"{{ d.items() | list }}", "[('b', 1), ('a', 'x')]"}));

INSTANTIATE_TEST_SUITE_P(
    Statements, Rendering,
    testing::Values(
        Case{"{% for x in l if x > 1 %}{{ loop.index }}{{ x }}{{ ',' if not loop.last }}{% endfor "
             "%}",
             "13,22"},
        Case{"{% for x in [] %}{% else %}none{% endfor %}", "none"},
        Case{"{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}"
             "{% if x == 2 %}{% break %}{% endif %}{% endfor %}",
             "32"},
        Case{"{% set x = 1 %}{% for i in l %}{% set x = i %}{% endfor %}{{ x }}", "1"},
        Case{"{% set n = namespace(t=0) %}{% for i in l %}{% set n.t = n.t + i %}{% endfor %}{{ "
             "n.t }}",
             "6"},
        Case{"{% macro f(a, b='x') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{% set c = 9 %}{{ f(1) }}"
             "{{ f(b=2, a=3) }}",
             "1x9329"},
        Case{"{% set x | upper %}a{{ s }}{% endset %}{{ x }}", "AHELLO"},
        Case{"{% macro f() %}<{{ caller(1) }}>{% endmacro %}{% call(x) f() %}{{ x }}!{% endcall %}",
             "<1!>"},
        Case{"{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}", "3"},
        Case{"{% generation %}{{ s }}{% endgeneration %}", "Hello"},
        Case{"{% for a in m %}{{ loop.previtem.role if loop.previtem }}-{{ a.role }};{% endfor %}",
             "-user;user-tool;"}));

INSTANTIATE_TEST_SUITE_P(
    Filters, Rendering,
    testing::Values(
        Case{"{{ {'é': '<>&\"', 'n': [1.0, none, true]} | tojson }}",
             "{\"é\": \"<>&\\\"\", \"n\": [1.0, null, true]}"},
        Case{"{{ d | tojson(indent=2) }}", "{\n  \"b\": 1,\n  \"a\": \"x\"\n}"},
        Case{"{{ '🙂' | tojson(ensure_ascii=true) }}", "\"\\ud83d\\ude42\""},
        Case{"{{ m | selectattr('role', 'eq', 'tool') | map(attribute='n') | join }}", "1"},
        Case{"{{ l | sort | join(',') }} {{ d | dictsort }}", "1,2,3 [('a', 'x'), ('b', 1)]"},
        Case{"{{ missing | default('d') }}{{ '' | default('e', true) }}", "de"},
        Case{"{{ ' a ' | trim | length }}{{ '日本' | length }}", "12"},
        Case{"{% set g = l | map('string') %}{{ g | join }}{{ g | join }}", "312"}));

TEST(ChatTemplate, NamesLineAndColumnOfASyntaxError) {
  EXPECT_THAT([] { ChatTemplate("ab\n {% iff x %}"); },
              ThrowsMessage<Error>(HasSubstr("line 2, column 5")));
}

class Refusal : public testing::TestWithParam<Case> {};

TEST_P(Refusal, SaysWhy) {
  EXPECT_THAT([] { render(GetParam().source); },
              ThrowsMessage<Error>(HasSubstr(GetParam().expected)));
}

INSTANTIATE_TEST_SUITE_P(
    ChatTemplate, Refusal,
    testing::Values(Case{"{{ raise_exception('Bad roles') }}", "chat template: Bad roles"},
                    Case{"{{ missing.x }}", "'missing' is undefined"},
                    Case{"{{ 'a' + 1 }}", "can only concatenate str"},
                    Case{"{{ {}.update({}) }}", "unsafe"},
                    Case{"{{ 1 | nope }}", "no filter named"},
                    Case{"{% include 'x' %}", "unsupported tag 'include'"},
                    Case{"{% if 1 %}", "expected 'endif'"}, Case{"{{ 'a }}", "no end"},
                    Case{"{{ 9223372036854775807 + 1 }}", "overflow"},
                    Case{"{{ 1 // 0 }}", "division by zero"},
                    Case{"{{ 1e3 ** 1000 }}", "no finite"}, Case{"{{ 1e30 | int }}", "overflow"}));

INSTANTIATE_TEST_SUITE_P(
    Limits, Refusal,
    testing::Values(
        Case{"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"},
        Case{"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
             "steps"},
        Case{"{{ 'a' * 9999999999 }}", "produces more than"},
        Case{"{{ range(999999) }}", "a range of more than"},
        Case{"{% set n = namespace() %}{% set n.n = n %}{{ n }}", "nested more than"}));

TEST(ChatTemplate, RefusesDeepNestingWhereverItIs) {
  const std::vector<std::pair<std::string, std::string>> brackets = {
      {"(", ")"}, {"[", "]"}, {"{1:", "}"}, {"-", ""}, {"not ", ""}, {"f(", ")"}};
  for (const auto& [open, close] : brackets) {
    std::string source = "{{ ";
    for (int i = 0; i < 100000; ++i) source += open;
    source += "1";
    for (int i = 0; i < 100000; ++i) source += close;
    EXPECT_THROW(ChatTemplate(source + " }}"), Error) << open;
  }
  std::string chain = "{{ 1";
  for (int i = 0; i < 100000; ++i) chain += " + 1";
  EXPECT_THROW(ChatTemplate(chain + " }}"), Error);
}

TEST(ChatTemplate, ReadsInvalidUtf8AsReplacementCharacters) {
  EXPECT_EQ(render("\xff{{ x }}", {{"x", "a\x80"}}),
            "\uFFFD"
            "a\uFFFD");
}

TEST(ChatTemplate, IsLoadedFromItsFileFirst) {
  const TemporaryFolder folder;
  EXPECT_EQ(load_chat_template(folder.path()), std::nullopt);
  folder.write("tokenizer_config.json", R"({"eos_token": "x"})");
  EXPECT_EQ(load_chat_template(folder.path()), std::nullopt);
  folder.write("tokenizer_config.json", R"({"chat_template": "text"})");
  EXPECT_EQ(load_chat_template(folder.path()), "text");
  folder.write(
      "tokenizer_config.json",
      R"({"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]})");
  EXPECT_EQ(load_chat_template(folder.path()), "d");
  folder.write("tokenizer_config.json", R"({"chat_template": 1})");
  EXPECT_THROW(load_chat_template(folder.path()), Error);
  folder.write("chat_template.jinja", "file");
  EXPECT_EQ(load_chat_template(folder.path()), "file");
}

TEST(ChatTemplate, RendersTheBundledModels) {
  const std::filesystem::path source = REPLAYSSM_SOURCE_DIR;
  for (const char* name : {"tiny-nemotron-h", "tiny-qwen3.5"}) {
    const std::optional<std::string> text = load_chat_template(source / "models" / name);
    ASSERT_TRUE(text.has_value());
    const Json variables = {{"messages", {{{"role", "user"}, {"content", "Hi"}}}},
                            {"add_generation_prompt", true}};
    EXPECT_EQ(render(*text, variables), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  }
}

}  // namespace
}  // namespace replayssm
