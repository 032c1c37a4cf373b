#include "server/json_fields.h"

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "server/api_error.h"

namespace replayssm::server {
namespace {

constexpr int64_t kDeepest = 64;
constexpr int64_t kMostMembers = 1024;  // of an object, which is searched from end to end

// Why a text is not to be parsed, whether it is JSON or not; empty where nothing is against it.
std::string obstacle(std::string_view text) {
  std::vector<int64_t> commas;  // of each bracket that is open; of lists they do not count
  bool in_text = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_text) {
      if (c == '\\') ++i;
      in_text = c != '"';
    } else if (c == '"') {
      in_text = true;
    } else if (c == '[' || c == '{') {
      if (std::ssize(commas) == kDeepest) return concat("nested at most ", kDeepest, " deep");
      commas.push_back(c == '{' ? 0 : std::numeric_limits<int64_t>::min());
    } else if (commas.empty()) {
      continue;
    } else if (c == ',' && ++commas.back() == kMostMembers) {
      return concat("of objects with at most ", kMostMembers, " members");
    } else if (c == ']' || c == '}') {
      commas.pop_back();
    }
  }
  return {};
}

// The whole number that a JSON number is; none where it has a fraction or cannot be told exactly.
std::optional<int64_t> whole_number(const Json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return {};
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return {};
  constexpr double kExact = int64_t{1} << 53;
  const auto number = value.get<double>();
  if (!(std::abs(number) <= kExact) || std::floor(number) != number) return {};
  return static_cast<int64_t>(number);
}

std::string shown(const Json& value) {
  constexpr size_t kLongest = 80;
  std::string text = to_text(value);
  if (text.size() > kLongest) text = std::string("a longer ") + value.type_name();
  return text;
}

}  // namespace

Json parse_body(std::string_view body) {
  if (const std::string what = obstacle(body); !what.empty())
    throw ApiError(400, "body: expected JSON " + what);
  try {
    Json value = Json::parse(body);
    if (!value.is_object()) throw ApiError(400, "body: expected a JSON object");
    return value;
  } catch (const Json::parse_error& error) {
    throw ApiError(400, concat("body: expected JSON in UTF-8, malformed at byte ", error.byte));
  } catch (const Json::out_of_range&) {
    throw ApiError(400, "body: expected numbers in the range of a double");
  }
}

Json parse_embedded(std::string_view text) {
  return obstacle(text).empty() ? Json::parse(text, nullptr, false)
                                : Json(Json::value_t::discarded);
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
  const auto number = whole_number(*value);
  if (!number || *number < low || *number > high) {
    bad_field(name_of(name), "expected a whole number from ", low, " to ", high, ", got ",
              shown(*value));
  }
  return number;
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
