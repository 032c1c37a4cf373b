#include "server/json_grammar.h"

#include <algorithm>
#include <array>
#include <map>
#include <ranges>
#include <set>
#include <string>
#include <vector>

#include "server/api_error.h"

namespace replayssm::server {
namespace {

using Alternative = Grammar::Alternative;
constexpr const char* kParam = "response_format.json_schema";

Alternative operator+(Alternative a, const Alternative& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// The rules that all JSON is made of.
class JsonRules {
 public:
  explicit JsonRules(Grammar& grammar) : g(grammar) {
    add_space();
    add_text();
    add_numbers();
    value = g.add_rule();
    object =
        list("{", "}", g.rule({call(text), call(space), one_of(":"), call(space), call(value)}));
    array = list("[", "]", value);
    for (const int32_t rule : {text, number, object, array}) g.add_alternative(value, {call(rule)});
    for (const char* word : {"true", "false", "null"}) g.add_alternative(value, literal(word));
  }

  // Items between brackets, any number of them.
  int32_t list(std::string_view open, std::string_view close, int32_t item) {
    const int32_t rest = g.add_rule();
    g.add_alternative(rest, literal(close));
    g.add_alternative(rest, {one_of(","), call(space), call(item), call(space), call(rest)});
    const int32_t whole = g.rule(literal(open) + Alternative{call(space)} + literal(close));
    g.add_alternative(
        whole, literal(open) + Alternative{call(space), call(item), call(space), call(rest)});
    return whole;
  }

  Grammar& g;
  int32_t space = -1, character = -1, text = -1, integer = -1, number = -1;
  int32_t object = -1, array = -1, value = -1;

 private:
  // Nothing, a blank, or a new line with a few: a model could go on with blanks for ever.
  void add_space() {
    constexpr int kMostBlanks = 16;
    int32_t blanks = g.rule({});
    for (int i = 0; i < kMostBlanks; ++i) {
      const int32_t more = g.rule({});
      g.add_alternative(more, {one_of(" "), call(blanks)});
      blanks = more;
    }
    space = g.rule({});
    g.add_alternative(space, {one_of(" ")});
    g.add_alternative(space, {one_of("\n"), call(blanks)});
  }

  void add_text() {
    Grammar::Element plain = between(0x20, 0x7f);
    plain.bytes.reset('"');
    plain.bytes.reset('\\');
    const Grammar::Element tail = between(0x80, 0xbf), digit = one_of("0123456789abcdefABCDEF");
    character = g.rule({plain});
    for (const Alternative& bytes : std::initializer_list<Alternative>{
             {between(0xc2, 0xdf), tail},
             {between(0xe0, 0xe0), between(0xa0, 0xbf), tail},
             {between(0xe1, 0xec), tail, tail},
             {between(0xed, 0xed), between(0x80, 0x9f), tail},
             {between(0xee, 0xef), tail, tail},
             {between(0xf0, 0xf0), between(0x90, 0xbf), tail, tail},
             {between(0xf1, 0xf3), tail, tail, tail},
             {between(0xf4, 0xf4), between(0x80, 0x8f), tail, tail},
             {one_of("\\"), one_of("\"\\/bfnrt")},
             // No surrogates, which would have to come in pairs.
             {one_of("\\"), one_of("u"), one_of("0123456789abcefABCEF"), digit, digit, digit}}) {
      g.add_alternative(character, bytes);
    }
    const int32_t rest = g.add_rule();
    g.add_alternative(rest, {one_of("\"")});
    g.add_alternative(rest, {call(character), call(rest)});
    text = g.rule({one_of("\""), call(rest)});
  }

  void add_numbers() {
    const Grammar::Element digit = one_of("0123456789");
    const int32_t digits = g.rule({});
    g.add_alternative(digits, {digit, call(digits)});
    const int32_t natural = g.rule({one_of("0")});
    g.add_alternative(natural, {one_of("123456789"), call(digits)});
    integer = g.rule({call(natural)});
    g.add_alternative(integer, {one_of("-"), call(natural)});
    const int32_t fraction = g.rule({});
    g.add_alternative(fraction, {one_of("."), digit, call(digits)});
    const int32_t exponent = g.rule({});
    for (const Alternative& sign : {Alternative{}, Alternative{one_of("+-")}})
      g.add_alternative(exponent, Alternative{one_of("eE")} + sign + Alternative{digit});
    number = g.rule({call(integer), call(fraction), call(exponent)});
  }
};

class SchemaRules {
 public:
  SchemaRules(const Json& schema, JsonRules& json) : root_(schema), json_(json), g_(json.g) {}

  int32_t rule_of(const Json& schema);

 private:
  static void check_keywords(const Json& schema);
  void check_room(size_t elements) const;
  int32_t keywords(const Json& schema);
  int32_t exactly(const Json& value);
  int32_t of_type(const std::string& type, const Json& schema);
  int32_t reference(const std::string& path);
  int32_t alternatives(const Json& schemas, const char* keyword);
  int32_t object(const Json& schema);
  int32_t array(const Json& schema);
  int32_t text(const Json& schema);
  static int64_t count(const Json& schema, const char* keyword, int64_t absent);
  int32_t repeated(int32_t first, int32_t next, int64_t least, int64_t most);

  const Json& root_;
  JsonRules& json_;
  Grammar& g_;
  std::map<std::string, int32_t> references_;
  int depth_ = 0;  // of schemas within one another, references followed
};

// Keywords that only describe are passed over; those that demand what is not enforced are not.
void SchemaRules::check_keywords(const Json& schema) {
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
      bad_field(kParam, "the keyword ", name, " is not supported");
  }
}

// Whether so many elements more may be.
void SchemaRules::check_room(size_t elements) const {
  constexpr size_t kMost = 1 << 18;
  if (static_cast<size_t>(g_.size()) + elements > kMost)
    bad_field(kParam, "expected a smaller schema");
}

int32_t SchemaRules::exactly(const Json& value) {
  const std::string text = to_text(value);
  check_room(text.size());
  return g_.rule(literal(text));
}

int32_t SchemaRules::rule_of(const Json& schema) {
  constexpr int kDeepest = 100;
  check_room(0);
  if (depth_ == kDeepest) bad_field(kParam, "expected schemas nested at most ", kDeepest, " deep");
  ++depth_;
  const int32_t rule = keywords(schema);
  --depth_;
  return rule;
}

int32_t SchemaRules::keywords(const Json& schema) {
  if (schema == true || (schema.is_object() && schema.empty())) return json_.value;
  if (!schema.is_object()) bad_field(kParam, "expected schemas to be objects");
  check_keywords(schema);
  const Fields fields(schema);
  if (const auto path = fields.text("$ref")) return reference(*path);
  if (schema.contains("const")) return exactly(schema["const"]);
  if (const Json* values = fields.find("enum")) {
    if (!values->is_array() || values->empty())
      bad_field(kParam, "enum: expected a list of values");
    const int32_t rule = g_.add_rule();
    for (const Json& value : *values) g_.add_alternative(rule, {call(exactly(value))});
    return rule;
  }
  for (const char* keyword : {"anyOf", "oneOf"}) {
    if (const Json* schemas = fields.find(keyword)) return alternatives(*schemas, keyword);
  }
  const Json* type = fields.find("type");
  if (!type) return of_type(schema.contains("properties") ? "object" : "any", schema);
  if (type->is_string()) return of_type(type->get<std::string>(), schema);
  if (!type->is_array() || type->empty()) bad_field(kParam, "type: expected a name or a list");
  const int32_t rule = g_.add_rule();
  for (const Json& name : *type) {
    if (!name.is_string()) bad_field(kParam, "type: expected names");
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
  if (type != "boolean") bad_field(kParam, "type: expected one of JSON's, got ", type);
  const int32_t rule = g_.rule(literal("true"));
  g_.add_alternative(rule, literal("false"));
  return rule;
}

int32_t SchemaRules::reference(const std::string& path) {
  const auto [at, added] = references_.try_emplace(path, -1);
  if (!added) return at->second;
  const int32_t rule = at->second = g_.add_rule();
  const Json* target = nullptr;
  try {
    if (path.starts_with('#')) target = &root_.at(Json::json_pointer(path.substr(1)));
  } catch (const Json::exception&) {
  }
  if (!target) bad_field(kParam, "$ref: there is nothing at ", path);
  g_.add_alternative(rule, {call(rule_of(*target))});
  return rule;
}

int32_t SchemaRules::alternatives(const Json& schemas, const char* keyword) {
  if (!schemas.is_array() || schemas.empty())
    bad_field(kParam, keyword, ": expected a list of schemas");
  const int32_t rule = g_.add_rule();
  for (const Json& schema : schemas) g_.add_alternative(rule, {call(rule_of(schema))});
  return rule;
}

int64_t SchemaRules::count(const Json& schema, const char* keyword, int64_t absent) {
  constexpr int64_t kMost = 1000;
  const auto value = Fields(schema, std::string(kParam) + ": ").integer(keyword, 0, kMost);
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
  if (most >= 0 && most < least) bad_field(kParam, "maxLength: expected at least minLength");
  const int32_t inner = repeated(json_.character, json_.character, least, most);
  return g_.rule({one_of("\""), call(inner), one_of("\"")});
}

int32_t SchemaRules::array(const Json& schema) {
  const int32_t item = schema.contains("items") ? rule_of(schema["items"]) : json_.value;
  const int64_t least = count(schema, "minItems", 0), most = count(schema, "maxItems", -1);
  if (most >= 0 && most < least) bad_field(kParam, "maxItems: expected at least minItems");
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
    if (!required.empty()) bad_field(kParam, "required: expected names of properties");
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
      bad_field(kParam, "required: expected names of properties");
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

std::shared_ptr<const Grammar> any_object_grammar() {
  const auto grammar = std::make_shared<Grammar>();
  grammar->root = JsonRules(*grammar).object;
  return grammar;
}

std::shared_ptr<const Grammar> schema_grammar(const Json& schema) {
  const auto grammar = std::make_shared<Grammar>();
  JsonRules json(*grammar);
  grammar->root = SchemaRules(schema, json).rule_of(schema);
  if (grammar->begins_with_itself()) bad_field(kParam, "$ref: expected none that leads to itself");
  return grammar;
}

}  // namespace replayssm::server
