#include "server/json_grammar.h"

#include <algorithm>
#include <array>
#include <map>
#include <ranges>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/api_error.h"

namespace replayssm::server {
namespace {

using Alternative = Grammar::Alternative;

class SchemaRules {
 public:
  SchemaRules(const Json& root, const JsonRules& json, const SchemaUse& use)
      : root_(root), json_(json), g_(json.g), use_(use) {}

  int32_t rule_of(const Json& schema);

 private:
  template <class... Args>
  [[noreturn]] void refuse(const Args&... args) const {
    bad_field(use_.param, args...);
  }
  void check_keywords(const Json& schema) const;
  void check_room(size_t elements) const { server::check_room(g_, elements, use_.param); }
  int32_t keywords(const Json& schema);
  int32_t exactly(std::span<const Json> values);
  int32_t of_type(const std::string& type, const Json& schema);
  int32_t reference(const std::string& path);
  int32_t alternatives(const Json& schemas, const char* keyword);
  int32_t object(const Json& schema);
  int32_t array(const Json& schema);
  int32_t text(const Json& schema);
  int64_t count(const Json& schema, const char* keyword, int64_t absent) const;
  int32_t repeated(int32_t first, int32_t next, int64_t least, int64_t most);

  const Json& root_;
  const JsonRules& json_;
  Grammar& g_;
  const SchemaUse& use_;
  std::map<std::string, int32_t> references_;
  int depth_ = 0;  // of schemas within one another, references followed
};

// Keywords that only describe are passed over; those that demand what is not enforced are not.
void SchemaRules::check_keywords(const Json& schema) const {
  if (!use_.strict) return;
  static constexpr std::array<std::string_view, 28> kKnown = {
      "type",      "properties",  "required", "additionalProperties",
      "items",     "minItems",    "maxItems", "minLength",
      "maxLength", "enum",        "const",    "anyOf",
      "oneOf",     "$ref",        "$defs",    "definitions",
      "title",     "description", "default",  "examples",
      "$schema",   "$id",         "$comment", "deprecated",
      "readOnly",  "writeOnly",   "format",   "strict"};
  for (const auto& [name, value] : schema.items()) {
    if (std::ranges::find(kKnown, name) == kKnown.end())
      refuse("the keyword ", name, " is not supported");
  }
}

// One of the values. What texts begin with in common is followed once.
int32_t SchemaRules::exactly(std::span<const Json> values) {
  constexpr size_t kElements = 4;  // of a byte
  std::map<std::pair<int32_t, char>, int32_t> behind;
  std::set<int32_t> ends;
  const int32_t first = g_.add_rule();
  for (const Json& value : values) {
    const std::string text = to_text(value);
    check_room(kElements * text.size());
    int32_t rule = first;
    for (const char byte : text) {
      const auto [at, added] = behind.try_emplace({rule, byte}, -1);
      if (added) {
        at->second = g_.add_rule();
        g_.add_alternative(rule, {one_of({&byte, 1}), call(at->second)});
      }
      rule = at->second;
    }
    if (ends.insert(rule).second) g_.add_alternative(rule, {});
  }
  return first;
}

int32_t SchemaRules::rule_of(const Json& schema) {
  constexpr int kDeepest = 100;
  check_room(0);
  if (depth_ == kDeepest) refuse("expected schemas nested at most ", kDeepest, " deep");
  ++depth_;
  const int32_t rule = keywords(schema);
  --depth_;
  return rule;
}

int32_t SchemaRules::keywords(const Json& schema) {
  if (schema == true || (schema.is_object() && schema.empty())) return json_.value;
  if (!schema.is_object()) refuse("expected schemas to be objects");
  check_keywords(schema);
  const Fields fields(schema);
  if (const auto path = fields.text("$ref")) return reference(*path);
  if (schema.contains("const")) return exactly({&schema["const"], 1});
  if (const Json* values = fields.find("enum")) {
    if (!values->is_array() || values->empty()) refuse("enum: expected a list of values");
    return exactly(values->get_ref<const Json::array_t&>());
  }
  for (const char* keyword : {"anyOf", "oneOf"}) {
    if (const Json* schemas = fields.find(keyword)) return alternatives(*schemas, keyword);
  }
  const Json* type = fields.find("type");
  if (!type) return of_type(schema.contains("properties") ? "object" : "any", schema);
  if (type->is_string()) return of_type(type->get<std::string>(), schema);
  if (!type->is_array() || type->empty()) refuse("type: expected a name or a list");
  const int32_t rule = g_.add_rule();
  for (const Json& name : *type) {
    if (!name.is_string()) refuse("type: expected names");
    g_.add_alternative(rule, {call(of_type(name.get<std::string>(), schema))});
  }
  return rule;
}

int32_t SchemaRules::of_type(const std::string& type, const Json& schema) {
  check_room(0);
  if (type == "object") return object(schema);
  if (type == "array") return array(schema);
  if (type == "string") return text(schema);
  if (type == "number") return json_.number;
  if (type == "integer") return json_.integer;
  if (type == "null") return g_.rule(literal("null"));
  if (type == "any") return json_.value;
  if (type != "boolean") refuse("type: expected one of JSON's, got ", type);
  const int32_t rule = g_.rule(literal("true"));
  g_.add_alternative(rule, literal("false"));
  return rule;
}

// What a reference points at; null: nothing.
const Json* target_of(const Json& root, const std::string& path) {
  if (!path.starts_with('#')) return nullptr;
  try {
    return &root.at(Json::json_pointer(path.substr(1)));
  } catch (const Json::exception&) {
    return nullptr;
  }
}

int32_t SchemaRules::reference(const std::string& path) {
  const auto [at, added] = references_.try_emplace(path, -1);
  if (!added) return at->second;
  const int32_t rule = at->second = g_.add_rule();
  const Json* target = target_of(root_, path);
  if (!target) refuse("$ref: there is nothing at ", path);
  g_.add_alternative(rule, {call(rule_of(*target))});
  return rule;
}

int32_t SchemaRules::alternatives(const Json& schemas, const char* keyword) {
  if (!schemas.is_array() || schemas.empty()) refuse(keyword, ": expected a list of schemas");
  const int32_t rule = g_.add_rule();
  for (const Json& schema : schemas) g_.add_alternative(rule, {call(rule_of(schema))});
  return rule;
}

int64_t SchemaRules::count(const Json& schema, const char* keyword, int64_t absent) const {
  constexpr int64_t kMost = 1000;
  const auto value = Fields(schema, use_.param + ": ").integer(keyword, 0, kMost);
  return value.value_or(absent);
}

// `first`, then `next` again and again; `most` < 0: any number. The alternatives end with nothing.
int32_t SchemaRules::repeated(int32_t first, int32_t next, int64_t least, int64_t most) {
  int32_t rest = g_.rule({});
  if (most < 0) {
    g_.add_alternative(rest, {call(next), call(rest)});
    most = std::max<int64_t>(least, 1);
  }
  for (int64_t i = most; i > 0; --i) {
    const int32_t rule = g_.rule({call(i == 1 ? first : next), call(rest)});
    if (i > least) g_.add_alternative(rule, {});
    rest = rule;
  }
  return rest;
}

int32_t SchemaRules::text(const Json& schema) {
  if (!schema.contains("minLength") && !schema.contains("maxLength")) return json_.text;
  const int64_t least = count(schema, "minLength", 0), most = count(schema, "maxLength", -1);
  if (most >= 0 && most < least) refuse("maxLength: expected at least minLength");
  const int32_t inner = repeated(json_.character, json_.character, least, most);
  return g_.rule({one_of("\""), call(inner), one_of("\"")});
}

int32_t SchemaRules::array(const Json& schema) {
  const int32_t item = schema.contains("items") ? rule_of(schema["items"]) : json_.value;
  const int64_t least = count(schema, "minItems", 0), most = count(schema, "maxItems", -1);
  if (most >= 0 && most < least) refuse("maxItems: expected at least minItems");
  const int32_t first = g_.rule({call(item), call(json_.space)});
  const int32_t next = g_.rule({one_of(","), call(json_.space), call(item), call(json_.space)});
  return g_.rule(
      {one_of("["), call(json_.space), call(repeated(first, next, least, most)), one_of("]")});
}

// The properties in their order; those that are not required may be left out.
int32_t SchemaRules::object(const Json& schema) {
  const Fields fields(schema);
  const Json* properties = fields.object("properties");
  const Json required = schema.value("required", Json::array());
  if (!properties || properties->empty()) {
    if (!required.empty()) refuse("required: expected names of properties");
    const Json more = schema.value("additionalProperties", Json(true));
    const int32_t value = more == false ? -1 : rule_of(more);
    if (value < 0) return g_.rule({one_of("{"), call(json_.space), one_of("}")});
    const int32_t member =
        g_.rule({call(json_.text), call(json_.space), one_of(":"), call(json_.space), call(value)});
    return json_.list("{", "}", member);
  }
  std::set<std::string> needed;
  for (const Json& name : required) {
    if (!name.is_string() || !properties->contains(name.get<std::string>()))
      refuse("required: expected names of properties");
    needed.insert(name.get<std::string>());
  }
  // What may follow the members so far: [0] where there were none, [1] behind others.
  std::array<int32_t, 2> rest = {g_.rule({one_of("}")}), 0};
  rest[1] = rest[0];
  const auto& members = properties->get_ref<const Json::object_t&>();
  for (const auto& [name, schema_of_value] : members | std::views::reverse) {
    const int32_t value = rule_of(schema_of_value);
    const std::string text = to_text(name);
    check_room(2 * text.size());
    const Alternative member =
        literal(text) + Alternative{call(json_.space), one_of(":"),       call(json_.space),
                                    call(value),       call(json_.space), call(rest[1])};
    const Alternative comma = {one_of(","), call(json_.space)};
    std::array<int32_t, 2> next = {g_.rule(member), g_.rule(comma + member)};
    for (size_t behind = 0; behind < 2 && !needed.contains(name); ++behind)
      g_.add_alternative(next[behind], {call(rest[behind])});
    rest = next;
  }
  return g_.rule({one_of("{"), call(json_.space), call(rest[0])});
}

}  // namespace

void check_room(const Grammar& grammar, size_t elements, const std::string& param) {
  constexpr size_t kMost = 1 << 18;
  if (static_cast<size_t>(grammar.size()) + elements > kMost)
    bad_field(param, "expected a smaller schema");
}

int32_t add_schema(const JsonRules& json, const Json& schema, const Json& root,
                   const SchemaUse& use) {
  return SchemaRules(root, json, use).rule_of(schema);
}

void check_schemas(const Grammar& grammar, const std::string& param) {
  if (grammar.begins_with_itself()) bad_field(param, "$ref: expected none that leads to itself");
}

std::shared_ptr<const Grammar> any_object_grammar() {
  const auto grammar = std::make_shared<Grammar>();
  grammar->root = JsonRules(*grammar).object;
  return grammar;
}

std::shared_ptr<const Grammar> schema_grammar(const Json& schema) {
  const SchemaUse use{.param = "response_format.json_schema"};
  const auto grammar = std::make_shared<Grammar>();
  grammar->root = add_schema(JsonRules(*grammar), schema, schema, use);
  check_schemas(*grammar, use.param);
  return grammar;
}

}  // namespace replayssm::server
