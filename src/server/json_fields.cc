#include "server/json_fields.h"

#include <array>
#include <cmath>

#include "server/api_error.h"

namespace replayssm::server {
namespace {

constexpr int kDeepest = 64;

// Nesting of brackets outside strings.
int depth_of(std::string_view body) {
  int depth = 0, deepest = 0;
  bool in_text = false;
  for (size_t i = 0; i < body.size(); ++i) {
    const char c = body[i];
    if (in_text) {
      if (c == '\\') ++i;
      in_text = c != '"';
    } else if (c == '"') {
      in_text = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

std::string shown(const Json& value) {
  constexpr size_t kLongest = 80;
  std::string text = to_text(value);
  if (text.size() > kLongest) text = std::string("a longer ") + value.type_name();
  return text;
}

}  // namespace

Json parse_body(std::string_view body) {
  if (depth_of(body) > kDeepest) {
    throw ApiError(400, concat("body: expected JSON nested at most ", kDeepest, " deep"));
  }
  try {
    Json value = Json::parse(body);
    if (!value.is_object()) throw ApiError(400, "body: expected a JSON object");
    return value;
  } catch (const Json::parse_error& error) {
    throw ApiError(400, concat("body: expected JSON in UTF-8, malformed at byte ", error.byte));
  }
}

std::string to_text(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void append_quoted(std::string& out, std::string_view text) {
  static constexpr std::array<char, 16> kDigits = {'0', '1', '2', '3', '4', '5', '6', '7',
                                                   '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'};
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (byte < 0x20 || byte == 0x7f) {
      out += "\\u00";
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

const Json* Fields::find(const char* name) const {
  const auto at = object_.find(name);
  return at == object_.end() || at->is_null() ? nullptr : &*at;
}

std::optional<double> Fields::number(const char* name, double low, double high) const {
  const Json* value = find(name);
  if (!value) return {};
  if (!value->is_number() || !(value->get<double>() >= low && value->get<double>() <= high)) {
    bad_field(name_of(name), "expected a number from ", low, " to ", high, ", got ", shown(*value));
  }
  return value->get<double>();
}

std::optional<int64_t> Fields::integer(const char* name, int64_t low, int64_t high) const {
  const Json* value = find(name);
  if (!value) return {};
  const bool whole =
      value->is_number_integer() ||
      (value->is_number_float() && std::floor(value->get<double>()) == value->get<double>());
  if (!whole || value->get<double>() < static_cast<double>(low) ||
      value->get<double>() > static_cast<double>(high)) {
    bad_field(name_of(name), "expected a whole number from ", low, " to ", high, ", got ",
              shown(*value));
  }
  return value->get<int64_t>();
}

std::optional<bool> Fields::boolean(const char* name) const {
  const Json* value = find(name);
  if (!value) return {};
  if (!value->is_boolean()) {
    bad_field(name_of(name), "expected true or false, got ", shown(*value));
  }
  return value->get<bool>();
}

std::optional<std::string> Fields::text(const char* name) const {
  const Json* value = find(name);
  if (!value) return {};
  if (!value->is_string()) bad_field(name_of(name), "expected a text, got ", shown(*value));
  return value->get<std::string>();
}

const Json* Fields::object(const char* name) const {
  const Json* value = find(name);
  if (value && !value->is_object()) {
    bad_field(name_of(name), "expected an object, got ", shown(*value));
  }
  return value;
}

}  // namespace replayssm::server
