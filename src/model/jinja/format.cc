// "..." % values and "...".format(values).
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "core/check.h"
#include "model/jinja/builtins.h"
#include "model/jinja/unicode.h"

namespace replayssm::jinja {
namespace {

constexpr int kWidthLimit = 1000;

// One conversion: %[flags][width][.precision]letter.
struct Conversion {
  std::string flags;
  int width = 0;
  int precision = -1;
  char letter = '\0';
  std::string key;  // of %(key)s
};

class PercentFormatter {
 public:
  PercentFormatter(std::string_view format, const Value& arguments) : format_(format) {
    if (arguments.tuple() != nullptr) {
      positional_ = *arguments.tuple();
    } else {
      positional_ = {arguments};
      mapping_ = arguments.dict();
    }
  }

  std::string run() {
    std::string out;
    while (at_ < format_.size()) {
      const char c = format_[at_++];
      if (c != '%') {
        out.push_back(c);
      } else if (at_ < format_.size() && format_[at_] == '%') {
        out.push_back('%');
        ++at_;
      } else {
        out += convert(read_conversion());
      }
    }
    if (next_ < positional_.size() && mapping_ == nullptr) {
      fail("not all arguments converted during string formatting");
    }
    return out;
  }

 private:
  char peek() const { return at_ < format_.size() ? format_[at_] : '\0'; }

  int read_width() {
    int value = 0;
    while (peek() >= '0' && peek() <= '9') {
      value = value * 10 + (format_[at_++] - '0');
      if (value > kWidthLimit) fail("a format is wider than ", kWidthLimit);
    }
    return value;
  }

  Conversion read_conversion() {
    Conversion conversion;
    if (peek() == '(') {
      const size_t close = format_.find(')', at_);
      if (close == std::string_view::npos) fail("incomplete format key");
      conversion.key = format_.substr(at_ + 1, close - at_ - 1);
      at_ = close + 1;
      if (mapping_ == nullptr) fail("format requires a mapping");
    }
    while (peek() != '\0' && std::string_view("-+ 0#").find(peek()) != std::string_view::npos) {
      conversion.flags.push_back(format_[at_++]);
    }
    conversion.width = read_width();
    if (peek() == '.') {
      ++at_;
      conversion.precision = read_width();
    }
    if (peek() == '\0') fail("incomplete format");
    conversion.letter = format_[at_++];
    return conversion;
  }

  const Value& argument(const Conversion& conversion) {
    if (!conversion.key.empty()) {
      const Value* found = mapping_->find_text(conversion.key);
      if (found == nullptr) fail("the format has no value for '", conversion.key, "'");
      return *found;
    }
    if (next_ == positional_.size()) fail("not enough arguments for format string");
    return positional_[next_++];
  }

  std::string convert(const Conversion& conversion) {
    const Value& value = argument(conversion);
    switch (conversion.letter) {
      case 's': return pad_text(conversion, to_string(value));
      case 'r': return pad_text(conversion, to_repr(value));
      case 'd':
      case 'i':
      case 'u': return print(conversion, "lld", whole(value));
      case 'x':
      case 'X':
      case 'o': {
        const long long number = whole(value);
        if (number < 0) fail("unsupported format of a negative number");
        return print(conversion, concat("ll", conversion.letter).c_str(), number);
      }
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G': return print(conversion, std::string(1, conversion.letter).c_str(), real(value));
      default: fail("unsupported format character '", conversion.letter, "'");
    }
  }

  static long long whole(const Value& value) {
    if (value.is<double>() && std::fabs(*value.get<double>()) < 0x1p63) {
      return static_cast<long long>(*value.get<double>());
    }
    if (!value.is_integral()) fail("%d format: a number is required, not ", type_name(value));
    return to_integer(value);
  }

  static double real(const Value& value) {
    return value.is<double>() ? *value.get<double>() : static_cast<double>(to_integer(value));
  }

  static std::string pad_text(const Conversion& conversion, std::string text) {
    if (conversion.precision >= 0) {
      text.resize(character_offset(text, static_cast<size_t>(conversion.precision)));
    }
    const size_t length = character_count(text);
    const auto width = static_cast<size_t>(conversion.width);
    if (length >= width) return text;
    const std::string padding(width - length, ' ');
    const bool left = conversion.flags.find('-') != std::string::npos;
    return left ? text + padding : padding + text;
  }

  template <class Number>
  static std::string print(const Conversion& conversion, const char* type, Number number) {
    std::string format = "%" + conversion.flags;
    if (conversion.width > 0) format += concat(conversion.width);
    if (conversion.precision >= 0) format += concat(".", conversion.precision);
    format += type;
    char buffer[kWidthLimit * 2 + 512];
    const int length = std::snprintf(buffer, sizeof buffer, format.c_str(), number);
    return std::string(buffer, static_cast<size_t>(length));
  }

  std::string_view format_;
  size_t at_ = 0;
  List positional_;
  size_t next_ = 0;
  const Dict* mapping_ = nullptr;
};

// The value of a replacement field: an index or a name, then .attributes.
Value field_value(Interpreter& interpreter, std::string_view field, const Arguments& arguments,
                  size_t& next) {
  const size_t dot = field.find('.');
  const std::string_view name = field.substr(0, dot);
  Value value;
  size_t index = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), index);
  const bool is_index = !name.empty() && error == std::errc() && end == name.data() + name.size();
  if (name.empty() || is_index) {
    if (name.empty()) index = next++;
    if (index >= arguments.positional.size()) fail("format: no argument ", index);
    value = arguments.positional[index];
  } else {
    const auto found = std::find_if(arguments.named.begin(), arguments.named.end(),
                                    [&](const auto& named) { return named.first == name; });
    if (found == arguments.named.end()) fail("format: no argument '", name, "'");
    value = found->second;
  }
  if (dot == std::string_view::npos) return value;
  return interpreter.attribute(value, std::string(field.substr(dot + 1)));
}

}  // namespace

std::string percent_format(std::string_view format, const Value& arguments) {
  return PercentFormatter(format, arguments).run();
}

std::string brace_format(Interpreter& interpreter, std::string_view format,
                         const Arguments& arguments) {
  std::string out;
  size_t next = 0;
  for (size_t at = 0; at < format.size(); ++at) {
    const char c = format[at];
    const bool doubled = at + 1 < format.size() && format[at + 1] == c;
    if (c != '{' && c != '}') {
      out.push_back(c);
    } else if (doubled) {
      out.push_back(c);
      ++at;
    } else {
      const size_t close = c == '{' ? format.find('}', at) : std::string_view::npos;
      if (close == std::string_view::npos) fail("format: a single '", c, "'");
      const std::string_view field = format.substr(at + 1, close - at - 1);
      if (field.find_first_of(":![{") != std::string_view::npos) {
        fail("format: unsupported field {", field, "}");
      }
      const std::string text = to_string(field_value(interpreter, field, arguments, next));
      interpreter.charge(text.size());
      out += text;
      at = close;
    }
  }
  return out;
}

}  // namespace replayssm::jinja
