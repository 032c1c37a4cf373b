#include "server/tool_grammar.h"

#include <ranges>
#include <set>
#include <string>

#include "server/api_error.h"
#include "server/json_grammar.h"

namespace replayssm::server {
namespace {

using Alternative = Grammar::Alternative;

class ToolRules {
 public:
  explicit ToolRules(Grammar& grammar) : g_(grammar), json_(grammar) {}

  // {"name": NAME, "arguments": {...}}
  int32_t object(const Json& function, const SchemaUse& use) {
    const std::string name = to_text(function["name"]);
    const Json* parameters = parameters_of(function);
    const int32_t arguments =
        parameters ? add_schema(json_, *parameters, *parameters, use) : json_.object;
    return g_.rule(literal(R"({"name": )" + name + R"(, "arguments": )") +
                   Alternative{call(arguments)} + literal("}"));
  }

  // <function=NAME>, the parameters in their order, </function>
  int32_t tagged(const Json& function, const SchemaUse& use) {
    int32_t rest = g_.rule(literal("</function>"));
    if (const Json* parameters = parameters_of(function)) rest = members(*parameters, rest, use);
    const auto name = function["name"].get<std::string>();
    return g_.rule(literal("<function=" + name + ">\n") + Alternative{call(rest)});
  }

 private:
  // Those of an object that has any.
  static const Json* parameters_of(const Json& function) {
    const Json* parameters = Fields(function).object("parameters");
    return parameters && parameters->contains("properties") ? parameters : nullptr;
  }

  int32_t members(const Json& parameters, int32_t rest, const SchemaUse& use) {
    std::set<std::string> needed;
    for (const Json& name : parameters.value("required", Json::array())) {
      if (name.is_string()) needed.insert(name.get<std::string>());
    }
    const Json* properties = Fields(parameters, use.param + ": ").object("properties");
    const auto& all = properties->get_ref<const Json::object_t&>();
    for (const auto& [name, schema] : all | std::views::reverse) {
      check_room(g_, name.size(), use.param);
      const int32_t value = add_schema(json_, schema, parameters, use);
      const int32_t next =
          g_.rule(literal("<parameter=" + name + ">\n") + Alternative{call(value)} +
                  literal("\n</parameter>\n") + Alternative{call(rest)});
      if (!needed.contains(name)) g_.add_alternative(next, {call(rest)});
      rest = next;
    }
    return rest;
  }

  Grammar& g_;
  JsonRules json_;
};

}  // namespace

std::shared_ptr<const Grammar> tool_grammar(const Json& tools, ToolNotation notation,
                                            bool several) {
  constexpr size_t kLongestName = 256;
  const auto grammar = std::make_shared<Grammar>();
  ToolRules rules(*grammar);
  const int32_t one = grammar->add_rule();
  for (const Json& tool : tools) {
    const Json& function = tool["function"];
    if (function["name"].get_ref<const std::string&>().size() > kLongestName)
      bad_field("tools", "expected names of at most ", kLongestName, " bytes");
    const bool strict = Fields(function, "tools: ").boolean("strict").value_or(false);
    const SchemaUse use{.param = "tools", .strict = strict};
    const bool tagged = notation == ToolNotation::kTagged;
    grammar->add_alternative(
        one, {call(tagged ? rules.tagged(function, use) : rules.object(function, use))});
    check_room(*grammar, 0, use.param);
  }
  const bool list = notation == ToolNotation::kList;
  const std::string_view open = list ? "<TOOLCALL>[" : "<tool_call>\n";
  const std::string_view close = list ? "]</TOOLCALL>" : "\n</tool_call>";
  const int32_t more = grammar->rule({});
  if (several) {
    grammar->add_alternative(more, literal(list ? ", " : concat(close, "\n", open)) +
                                       Alternative{call(one), call(more)});
  }
  grammar->root =
      grammar->rule(literal(open) + Alternative{call(one), call(more)} + literal(close));
  check_schemas(*grammar, "tools");
  return grammar;
}

}  // namespace replayssm::server
