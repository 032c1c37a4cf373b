// Filters that make text or a number.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <iterator>

#include "core/check.h"
#include "model/jinja/builtins.h"
#include "model/jinja/string_methods.h"
#include "model/jinja/unicode.h"
#include "model/text/utf8.h"

namespace replayssm::jinja {
namespace {

using A = Arguments;
using I = Interpreter;
using V = const Value&;

constexpr int64_t kIndentLimit = 1000;

Value escape(I& interpreter, V input, A) {
  std::string out;
  for (char c : to_string(input)) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '\'': out += "&#39;"; break;
      case '"': out += "&#34;"; break;
      default: out.push_back(c);
    }
  }
  interpreter.charge(out.size());
  return out;
}

std::string indentation(V value) {
  if (value.string() != nullptr) return *value.string();
  const int64_t width = to_integer(value);
  if (width > kIndentLimit) fail("an indentation of more than ", kIndentLimit);
  return std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
}

Value indent(I& interpreter, V input, A arguments) {
  const Bound bound("indent", std::move(arguments), {"width", "first", "blank"}, 0);
  const std::string prefix = indentation(bound.has(0) ? bound[0] : Value(int64_t{4}));
  const bool blank = bound.flag(2, false);
  if (input.string() == nullptr) fail("indent: expected str, got ", type_name(input));
  const std::vector<std::string> lines = split_lines(*input.string() + "\n", false);
  std::string out = bound.flag(1, false) ? prefix : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    interpreter.charge(prefix.size() + lines[i].size() + 1);
    if (i > 0) out += "\n";
    if (i > 0 && (blank || !lines[i].empty())) out += prefix;
    out += lines[i];
  }
  return out;
}

Value tojson(I& interpreter, V input, A arguments) {
  const Bound bound("tojson", std::move(arguments),
                    {"ensure_ascii", "indent", "separators", "sort_keys"}, 0);
  JsonStyle style;
  style.ensure_ascii = bound.flag(0, false);
  style.sort_keys = bound.flag(3, false);
  if (bound.given(1)) {
    style.indent = indentation(bound[1]);
    style.item_separator = ",";
  }
  if (bound.given(2)) {
    const Items separators = interpreter.items_of(bound[2]);
    if (separators.size() != 2) fail("tojson: expected two separators");
    style.item_separator = to_string(separators[0]);
    style.key_separator = to_string(separators[1]);
  }
  std::string out = to_json(input, style);
  interpreter.charge(out.size());
  return out;
}

Value replace(I& interpreter, V input, A arguments) {
  const Bound bound("replace", std::move(arguments), {"old", "new", "count"}, 2);
  return replace_all(interpreter, to_string(input), to_string(bound[0]), to_string(bound[1]),
                     bound.given(2) ? to_integer(bound[2]) : -1);
}

Value trim(I&, V input, A arguments) {
  const Bound bound("trim", std::move(arguments), {"chars"}, 0);
  return strip(to_string(input), bound.has(0) ? bound[0] : Value::none(), true, true);
}

// Words begin after white space and the opening brackets and hyphens that Jinja names.
Value title(I& interpreter, V input, A) {
  const std::string text = to_string(input);
  interpreter.charge(text.size());
  std::string out;
  bool word_begins = true;
  for (const std::string& character : characters(text)) {
    const bool separates = white_space_at_start(character) > 0 ||
                           std::string_view("-({[<").find(character) != std::string_view::npos;
    out += separates ? character : word_begins ? to_upper(character) : to_lower(character);
    word_begins = separates;
  }
  return out;
}

Value truncate(I&, V input, A arguments) {
  const Bound bound("truncate", std::move(arguments), {"length", "killwords", "end", "leeway"}, 0);
  const std::string end = bound.text(2, "...");
  const int64_t length = bound.integer(0, 255);
  const int64_t leeway = bound.given(3) ? to_integer(bound[3]) : 5;
  const int64_t kept = length - static_cast<int64_t>(character_count(end));
  if (kept < 0) fail("truncate: expected length >= ", character_count(end), ", got ", length);
  if (leeway < 0) fail("truncate: expected leeway >= 0, got ", leeway);
  if (length_of(input) - leeway <= length) return input;
  if (input.string() == nullptr) fail("truncate: expected str, got ", type_name(input));
  const std::string& text = *input.string();
  std::string out = text.substr(0, character_offset(text, static_cast<size_t>(kept)));
  if (!bound.flag(1, false)) {
    const size_t space = out.rfind(' ');
    if (space != std::string::npos) out.resize(space);
  }
  return out + end;
}

Value wordcount(I&, V input, A) {
  int64_t words = 0;
  bool in_word = false;
  const std::string text = to_string(input);
  for (size_t at = 0; at < text.size();) {
    const text::Utf8Character character = text::decode_utf8(text, at);
    const bool part =
        is_alpha(character.code) || is_numeric(character.code) || character.code == '_';
    words += part && !in_word;
    in_word = part;
    at += character.length;
  }
  return words;
}

// In a query the slash is quoted too, and a space is a plus.
std::string quote_url(std::string_view text, bool in_query) {
  constexpr char kHex[] = "0123456789ABCDEF";
  constexpr std::string_view kSafe = "_.-~/";
  std::string out;
  for (char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x80 && std::isalnum(byte)) ||
        kSafe.substr(0, in_query ? 4 : 5).find(c) != std::string_view::npos) {
      out.push_back(c);
    } else if (c == ' ' && in_query) {
      out.push_back('+');
    } else {
      out += {'%', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return out;
}

Value urlencode(I& interpreter, V input, A) {
  const bool is_iterable = interpreter.apply_test("iterable", input, {});
  if (input.string() != nullptr || !is_iterable) {
    std::string out = quote_url(to_string(input), false);
    interpreter.charge(out.size());
    return out;
  }
  const Value pairs =
      input.dict() != nullptr ? interpreter.apply_filter("items", input, {}) : input;
  std::string out;
  for (const Value& pair : interpreter.items_of(pairs)) {
    const Items parts = interpreter.items_of(pair);
    if (parts.size() != 2) fail("urlencode: expected pairs, got ", parts.size(), " items");
    if (!out.empty()) out += "&";
    out += quote_url(to_string(parts[0]), true) + "=" + quote_url(to_string(parts[1]), true);
    interpreter.charge(out.size());
  }
  return out;
}

// The number that a whole text, white space aside, spells.
std::optional<double> parse_double(std::string_view text) {
  std::string digits = strip(text, Value::none(), true, true);
  if (digits.starts_with('+')) digits.erase(0, 1);
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

std::optional<int64_t> parse_integer(std::string_view text, int64_t base) {
  std::string digits = to_lower(strip(text, Value::none(), true, true));
  const bool minus = digits.starts_with('-');
  if (minus || digits.starts_with('+')) digits.erase(0, 1);
  const char* prefix = base == 16 ? "0x" : base == 8 ? "0o" : base == 2 ? "0b" : "\n";
  if (digits.starts_with(prefix)) digits.erase(0, 2);
  if (minus) digits.insert(0, "-");
  int64_t value = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), value, static_cast<int>(base));
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

Value truncated(double number, V fallback) {
  if (!std::isfinite(number)) return fallback;
  if (!(std::fabs(number) < 0x1p63)) fail("integer overflow");
  return static_cast<int64_t>(number);
}

Value to_int(I&, V input, A arguments) {
  const Bound bound("int", std::move(arguments), {"default", "base"}, 0);
  Value fallback = bound.has(0) ? bound[0] : Value(int64_t{0});
  const int64_t base = bound.integer(1, 10);
  if (base < 2 || base > 36) fail("int: expected a base from 2 to 36, got ", base);
  if (input.is_integral() || input.is_undefined()) return to_integer(input);
  if (input.is<double>()) return truncated(*input.get<double>(), fallback);
  if (input.string() == nullptr) return fallback;
  if (const std::optional<int64_t> whole = parse_integer(*input.string(), base)) return *whole;
  const std::optional<double> number = parse_double(*input.string());
  return number ? truncated(*number, fallback) : fallback;
}

Value to_float(I&, V input, A arguments) {
  const Bound bound("float", std::move(arguments), {"default"}, 0);
  Value fallback = bound.has(0) ? bound[0] : Value(0.0);
  if (input.is<double>()) return input;
  if (input.is_integral() || input.is_undefined()) return static_cast<double>(to_integer(input));
  if (input.string() == nullptr) return fallback;
  const std::optional<double> number = parse_double(*input.string());
  return number ? Value(*number) : fallback;
}

Value round(I&, V input, A arguments) {
  const Bound bound("round", std::move(arguments), {"precision", "method"}, 0);
  const int64_t precision = bound.integer(0, 0);
  const std::string method = bound.text(1, "common");
  if (precision < 0 || precision > 300) fail("round: expected a precision from 0 to 300");
  if (method != "common" && method != "ceil" && method != "floor") {
    fail("method must be common, ceil or floor");
  }
  if (method == "common" && input.is_integral()) return to_integer(input);
  const double number =
      input.is<double>() ? *input.get<double>() : static_cast<double>(to_integer(input));
  if (method != "common") {
    const double scale = std::pow(10.0, static_cast<double>(precision));
    return (method == "ceil" ? std::ceil(number * scale) : std::floor(number * scale)) / scale;
  }
  char digits[700];  // 309 digits before the point and up to 300 behind it
  std::snprintf(digits, sizeof digits, "%.*f", static_cast<int>(precision), number);
  return std::strtod(digits, nullptr);
}

Value absolute(I&, V input, A) {
  if (input.is<double>()) return std::fabs(*input.get<double>());
  const int64_t number = to_integer(input);
  if (number == INT64_MIN) fail("integer overflow");
  return number < 0 ? -number : number;
}

Value format(I& interpreter, V input, A arguments) {
  Value values = Value::tuple(std::move(arguments.positional));
  if (!arguments.named.empty()) {
    Dict named;
    for (auto& [name, value] : arguments.named) named.set(name, std::move(value));
    values = std::move(named);
  }
  std::string out = percent_format(to_string(input), values);
  interpreter.charge(out.size());
  return out;
}

Value to_text(I&, V input, A) { return to_string(input); }

Value default_value(I&, V input, A arguments) {
  const Bound bound("default", std::move(arguments), {"default_value", "boolean"}, 0);
  const bool missing = input.is_undefined() || (bound.flag(1, false) && !is_true(input));
  if (!missing) return input;
  return bound.has(0) ? bound[0] : Value("");
}

struct Entry {
  std::string_view name;
  FilterFunction filter;
};

constexpr Entry kFilters[] = {
    {"abs", absolute},
    {"capitalize", [](I&, V input, A) -> Value { return capitalize(to_string(input)); }},
    {"center",
     [](I& i, V input, A a) -> Value {
       const Bound bound("center", std::move(a), {"width"}, 0);
       return center(i, to_string(input), bound.integer(0, 80), " ");
     }},
    {"d", default_value},
    {"default", default_value},
    {"e", escape},
    {"escape", escape},
    {"float", to_float},
    {"forceescape", escape},
    {"format", format},
    {"indent", indent},
    {"int", to_int},
    {"lower", [](I&, V input, A) -> Value { return to_lower(to_string(input)); }},
    {"replace", replace},
    {"round", round},
    {"safe", to_text},
    {"string", to_text},
    {"title", title},
    {"tojson", tojson},
    {"trim", trim},
    {"truncate", truncate},
    {"upper", [](I&, V input, A) -> Value { return to_upper(to_string(input)); }},
    {"urlencode", urlencode},
    {"wordcount", wordcount},
};

}  // namespace

FilterFunction find_text_filter(std::string_view name) {
  const auto found = std::find_if(std::begin(kFilters), std::end(kFilters),
                                  [&](const Entry& entry) { return entry.name == name; });
  return found == std::end(kFilters) ? nullptr : found->filter;
}

FilterFunction find_filter(std::string_view name) {
  const FilterFunction filter = find_text_filter(name);
  return filter != nullptr ? filter : find_sequence_filter(name);
}

}  // namespace replayssm::jinja
