#include "model/jinja/string_methods.h"

#include <algorithm>
#include <iterator>

#include "core/check.h"
#include "model/jinja/unicode.h"
#include "model/text/utf8.h"

namespace replayssm::jinja {
namespace {

using S = const std::string&;

const std::string& need_string(const Value& value, std::string_view function) {
  if (value.string() == nullptr) fail(function, ": expected str, got ", type_name(value));
  return *value.string();
}

std::string spaces(Interpreter& interpreter, int64_t count, std::string_view fill) {
  if (count <= 0) return {};
  size_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<size_t>(count), fill.size(), &bytes)) bytes = SIZE_MAX;
  interpreter.charge(bytes);
  std::string out;
  for (int64_t i = 0; i < count; ++i) out += fill;
  return out;
}

// str.split without a separator.
List split_white_space(std::string_view text, int64_t limit) {
  List parts;
  while (true) {
    text.remove_prefix(white_space_at_start(text));
    if (text.empty()) return parts;
    if (limit >= 0 && static_cast<int64_t>(parts.size()) == limit) {
      parts.push_back(std::string(text.substr(0, white_space_at_end(text))));
      return parts;
    }
    size_t end = 0;
    while (end < text.size() && white_space_at_start(text.substr(end)) == 0) {
      end += text::decode_utf8(text, end).length;
    }
    parts.push_back(std::string(text.substr(0, end)));
    text.remove_prefix(end);
  }
}

List rsplit_white_space(std::string_view text, int64_t limit) {
  List parts;
  while (true) {
    text = text.substr(0, white_space_at_end(text));
    if (text.empty()) break;
    if (limit >= 0 && static_cast<int64_t>(parts.size()) == limit) {
      parts.push_back(std::string(text));
      break;
    }
    size_t begin = text.size();
    while (begin > 0 && white_space_at_end(text.substr(0, begin)) == begin) --begin;
    parts.push_back(std::string(text.substr(begin)));
    text = text.substr(0, begin);
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

Value split(Interpreter& interpreter, S text, Arguments arguments) {
  const Bound bound("split", std::move(arguments), {"sep", "maxsplit"}, 0);
  interpreter.charge(text.size() * sizeof(Value));
  const int64_t limit = bound.integer(1, -1);
  if (!bound.given(0)) return split_white_space(text, limit);
  const std::string& separator = need_string(bound[0], "split");
  if (separator.empty()) fail("empty separator");
  List parts;
  size_t at = 0;
  while (limit < 0 || static_cast<int64_t>(parts.size()) < limit) {
    const size_t found = text.find(separator, at);
    if (found == std::string::npos) break;
    parts.push_back(text.substr(at, found - at));
    at = found + separator.size();
  }
  parts.push_back(text.substr(at));
  return parts;
}

Value rsplit(Interpreter& interpreter, S text, Arguments arguments) {
  const Bound bound("rsplit", std::move(arguments), {"sep", "maxsplit"}, 0);
  interpreter.charge(text.size() * sizeof(Value));
  const int64_t limit = bound.integer(1, -1);
  if (!bound.given(0)) return rsplit_white_space(text, limit);
  const std::string& separator = need_string(bound[0], "rsplit");
  if (separator.empty()) fail("empty separator");
  List parts;
  std::string_view rest = text;
  while (limit < 0 || static_cast<int64_t>(parts.size()) < limit) {
    const size_t found = rest.rfind(separator);
    if (found == std::string_view::npos) break;
    parts.push_back(std::string(rest.substr(found + separator.size())));
    rest = rest.substr(0, found);
  }
  parts.push_back(std::string(rest));
  std::reverse(parts.begin(), parts.end());
  return parts;
}

template <bool kLeft, bool kRight>
Value strip_method(Interpreter&, S text, Arguments arguments) {
  const Bound bound("strip", std::move(arguments), {"chars"}, 0);
  return strip(text, bound.has(0) ? bound[0] : Value::none(), kLeft, kRight);
}

// The part of `text` that optional start and end arguments leave; nothing when start is beyond it.
std::optional<std::string_view> window(std::string_view text, const Bound& bound) {
  const int64_t size = length_of(Value(std::string(text)));
  const auto place = [&](size_t index, int64_t fallback) {
    if (!bound.given(index)) return fallback;
    const int64_t at = to_integer(bound[index]);
    return at < 0 ? std::max<int64_t>(at < -size ? 0 : at + size, 0) : at;
  };
  const int64_t begin = place(1, 0), end = std::min(place(2, size), size);
  if (begin > size || begin > end) return std::nullopt;
  const size_t first = character_offset(text, static_cast<size_t>(begin));
  return text.substr(first, character_offset(text.substr(first), static_cast<size_t>(end - begin)));
}

template <bool kStart>
Value affix_method(Interpreter&, S text, Arguments arguments) {
  const char* name = kStart ? "startswith" : "endswith";
  const Bound bound(name, std::move(arguments), {"prefix", "start", "end"}, 1);
  const std::optional<std::string_view> part = window(text, bound);
  const auto test = [&](const Value& affix) {
    const std::string& wanted = need_string(affix, name);
    return part && (kStart ? part->starts_with(wanted) : part->ends_with(wanted));
  };
  if (bound[0].tuple() == nullptr) return test(bound[0]);
  return std::any_of(bound[0].tuple()->begin(), bound[0].tuple()->end(), test);
}

// find, rfind, index and rindex.
template <bool kLast, bool kMustFind>
Value find_method(Interpreter&, S text, Arguments arguments) {
  const Bound bound("find", std::move(arguments), {"sub", "start", "end"}, 1);
  const std::string& wanted = need_string(bound[0], "find");
  const std::optional<std::string_view> part = window(text, bound);
  const size_t found = !part ? std::string::npos : kLast ? part->rfind(wanted) : part->find(wanted);
  if (found == std::string::npos) {
    if (kMustFind) fail("substring not found");
    return int64_t{-1};
  }
  const size_t bytes = static_cast<size_t>(part->data() - text.data()) + found;
  return static_cast<int64_t>(character_count(std::string_view(text).substr(0, bytes)));
}

Value count(Interpreter&, S text, Arguments arguments) {
  const Bound bound("count", std::move(arguments), {"sub", "start", "end"}, 1);
  const std::string& wanted = need_string(bound[0], "count");
  const std::optional<std::string_view> part = window(text, bound);
  if (!part) return int64_t{0};
  if (wanted.empty()) return static_cast<int64_t>(character_count(*part)) + 1;
  int64_t found = 0;
  for (size_t at = part->find(wanted); at != std::string_view::npos;
       at = part->find(wanted, at + wanted.size())) {
    ++found;
  }
  return found;
}

Value replace(Interpreter& interpreter, S text, Arguments arguments) {
  const Bound bound("replace", std::move(arguments), {"old", "new", "count"}, 2);
  return replace_all(interpreter, text, need_string(bound[0], "replace"),
                     need_string(bound[1], "replace"), bound.integer(2, -1));
}

Value join(Interpreter& interpreter, S text, Arguments arguments) {
  const Bound bound("join", std::move(arguments), {"iterable"}, 1);
  std::string out;
  bool first = true;
  for (const Value& part : interpreter.items_of(bound[0])) {
    if (!first) out += text;
    first = false;
    out += need_string(part, "join");
    interpreter.charge(text.size() + part.string()->size());
  }
  return out;
}

template <bool kFirst>
Value partition(Interpreter&, S text, Arguments arguments) {
  const Bound bound("partition", std::move(arguments), {"sep"}, 1);
  const std::string& separator = need_string(bound[0], "partition");
  if (separator.empty()) fail("empty separator");
  const size_t found = kFirst ? text.find(separator) : text.rfind(separator);
  if (found == std::string::npos) {
    return kFirst ? Value::tuple({text, "", ""}) : Value::tuple({"", "", text});
  }
  return Value::tuple({text.substr(0, found), separator, text.substr(found + separator.size())});
}

template <bool kPrefix>
Value remove_affix(Interpreter&, S text, Arguments arguments) {
  const Bound bound("removeprefix", std::move(arguments), {"prefix"}, 1);
  const std::string& affix = need_string(bound[0], "removeprefix");
  if (kPrefix && text.starts_with(affix)) return text.substr(affix.size());
  if (!kPrefix && text.ends_with(affix)) return text.substr(0, text.size() - affix.size());
  return text;
}

template <bool kLeft>
Value justify(Interpreter& interpreter, S text, Arguments arguments) {
  const Bound bound("ljust", std::move(arguments), {"width", "fillchar"}, 1);
  const std::string fill = bound.text(1, " ");
  const int64_t missing = to_integer(bound[0]) - static_cast<int64_t>(character_count(text));
  const std::string padding = spaces(interpreter, missing, fill);
  return kLeft ? text + padding : padding + text;
}

Value zfill(Interpreter& interpreter, S text, Arguments arguments) {
  const Bound bound("zfill", std::move(arguments), {"width"}, 1);
  const int64_t missing = to_integer(bound[0]) - static_cast<int64_t>(character_count(text));
  const size_t sign = text.starts_with('+') || text.starts_with('-') ? 1 : 0;
  return text.substr(0, sign) + spaces(interpreter, missing, "0") + text.substr(sign);
}

template <bool (*kTest)(char32_t)>
Value all_characters(Interpreter&, S text, Arguments arguments) {
  const Bound bound("str method", std::move(arguments), {}, 0);
  for (size_t at = 0; at < text.size();) {
    const text::Utf8Character character = text::decode_utf8(text, at);
    if (!kTest(character.code)) return false;
    at += character.length;
  }
  return !text.empty();
}

bool is_alphanumeric(char32_t code) { return is_alpha(code) || is_numeric(code); }

Value cased(Interpreter& interpreter, const char* test, S text, Arguments arguments) {
  const Bound bound(test, std::move(arguments), {}, 0);
  return interpreter.apply_test(test, text, {});
}

template <std::string (*kMap)(std::string_view)>
Value mapped(Interpreter& interpreter, S text, Arguments arguments) {
  const Bound bound("str method", std::move(arguments), {}, 0);
  interpreter.charge(text.size());
  return kMap(text);
}

struct Entry {
  std::string_view name;
  StringMethod method;
};

constexpr Entry kMethods[] = {
    {"capitalize", mapped<capitalize>},
    {"center",
     [](Interpreter& i, S text, Arguments a) -> Value {
       const Bound bound("center", std::move(a), {"width", "fillchar"}, 1);
       return center(i, text, to_integer(bound[0]), bound.text(1, " "));
     }},
    {"count", count},
    {"endswith", affix_method<false>},
    {"find", find_method<false, false>},
    {"format",
     [](Interpreter& i, S text, Arguments a) -> Value { return brace_format(i, text, a); }},
    {"index", find_method<false, true>},
    {"isalnum", all_characters<is_alphanumeric>},
    {"isalpha", all_characters<is_alpha>},
    {"isdecimal", all_characters<is_decimal>},
    {"isdigit", all_characters<is_digit>},
    {"islower", [](Interpreter& i, S text, Arguments a) { return cased(i, "lower", text, a); }},
    {"isnumeric", all_characters<is_numeric>},
    {"isspace", all_characters<is_space>},
    {"isupper", [](Interpreter& i, S text, Arguments a) { return cased(i, "upper", text, a); }},
    {"join", join},
    {"ljust", justify<true>},
    {"lower", mapped<to_lower>},
    {"lstrip", strip_method<true, false>},
    {"partition", partition<true>},
    {"removeprefix", remove_affix<true>},
    {"removesuffix", remove_affix<false>},
    {"replace", replace},
    {"rfind", find_method<true, false>},
    {"rindex", find_method<true, true>},
    {"rjust", justify<false>},
    {"rpartition", partition<false>},
    {"rsplit", rsplit},
    {"rstrip", strip_method<false, true>},
    {"split", split},
    {"splitlines",
     [](Interpreter& i, S text, Arguments a) -> Value {
       const Bound bound("splitlines", std::move(a), {"keepends"}, 0);
       i.charge(text.size() * sizeof(Value));
       List lines;
       for (std::string& line : split_lines(text, bound.flag(0, false))) {
         lines.push_back(std::move(line));
       }
       return lines;
     }},
    {"startswith", affix_method<true>},
    {"strip", strip_method<true, true>},
    {"swapcase", mapped<swap_case>},
    {"title", mapped<title_case>},
    {"upper", mapped<to_upper>},
    {"zfill", zfill},
};

}  // namespace

StringMethod find_string_method(std::string_view name) {
  const auto found = std::find_if(std::begin(kMethods), std::end(kMethods),
                                  [&](const Entry& entry) { return entry.name == name; });
  return found == std::end(kMethods) ? nullptr : found->method;
}

std::string strip(std::string_view text, const Value& which, bool left, bool right) {
  if (which.is_none()) {
    if (left) text.remove_prefix(white_space_at_start(text));
    if (right) text = text.substr(0, white_space_at_end(text));
    return std::string(text);
  }
  const std::vector<std::string> set = characters(need_string(which, "strip"));
  const auto stripped = [&](std::string_view rest, bool at_start) {
    for (const std::string& character : set) {
      if (at_start ? rest.starts_with(character) : rest.ends_with(character))
        return character.size();
    }
    return size_t{0};
  };
  while (left) {
    const size_t length = stripped(text, true);
    if (length == 0) break;
    text.remove_prefix(length);
  }
  while (right) {
    const size_t length = stripped(text, false);
    if (length == 0) break;
    text.remove_suffix(length);
  }
  return std::string(text);
}

std::string replace_all(Interpreter& interpreter, std::string_view text, std::string_view from,
                        std::string_view to, int64_t limit) {
  std::string out;
  size_t at = 0;
  int64_t done = 0;
  interpreter.charge(text.size());
  while (limit < 0 || done < limit) {
    // An empty text is found before every character and at the end.
    const size_t found = from.empty() ? at : text.find(from, at);
    if (found == std::string_view::npos) break;
    interpreter.charge(to.size());
    out.append(text, at, found - at).append(to);
    at = found + from.size();
    ++done;
    if (!from.empty()) continue;
    if (at == text.size()) return out;
    const size_t length = text::decode_utf8(text, at).length;
    out.append(text, at, length);
    at += length;
  }
  return out.append(text, at);
}

std::string center(Interpreter& interpreter, std::string_view text, int64_t width,
                   std::string_view fill) {
  if (character_count(fill) != 1) fail("the fill character must be exactly one character long");
  const int64_t missing = width - static_cast<int64_t>(character_count(text));
  if (missing <= 0) return std::string(text);
  const int64_t left = missing / 2 + (missing & width & 1);
  return concat(spaces(interpreter, left, fill), text, spaces(interpreter, missing - left, fill));
}

std::vector<std::string> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const text::Utf8Character character = text::decode_utf8(text, at);
    const char32_t code = character.code;
    const bool ends = (code >= 0x0A && code <= 0x0D) || (code >= 0x1C && code <= 0x1E) ||
                      code == 0x85 || code == 0x2028 || code == 0x2029;
    size_t end = at + character.length;
    if (code == '\r' && end < text.size() && text[end] == '\n') ++end;
    if (ends) {
      lines.emplace_back(text.substr(begin, (keep_ends ? end : at) - begin));
      begin = end;
    }
    at = end;
  }
  if (begin < text.size()) lines.emplace_back(text.substr(begin));
  return lines;
}

}  // namespace replayssm::jinja
