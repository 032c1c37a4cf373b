#include "model/jinja/string_literal.h"

#include <cctype>
#include <charconv>
#include <cstdlib>
#include <optional>

#include "core/check.h"
#include "model/jinja/unicode.h"
#include "model/text/utf8.h"

namespace replayssm::jinja {
namespace {

// The number that `digits` characters at text[at] spell; nothing when there are fewer.
std::optional<char32_t> read_digits(std::string_view text, size_t at, size_t digits, int base) {
  const std::string_view part = text.substr(std::min(at, text.size()), digits);
  uint32_t code = 0;
  const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), code, base);
  if (error != std::errc() || part.size() != digits || end != part.data() + digits) {
    return std::nullopt;
  }
  return code;
}

class Unescaper {
 public:
  explicit Unescaper(std::string_view text) : text_(text) {}

  StringLiteral run() {
    while (at_ < text_.size() && literal_.error.empty()) {
      if (text_[at_] == '\\' && at_ + 1 < text_.size()) {
        escape();
      } else {
        literal_.value.push_back(text_[at_++]);
      }
    }
    return std::move(literal_);
  }

 private:
  void escape() {
    constexpr std::string_view kLetters = "abfnrtv\\'\"";
    constexpr std::string_view kValues = "\a\b\f\n\r\t\v\\'\"";
    const char letter = text_[at_ + 1];
    if (const size_t known = kLetters.find(letter); known != std::string_view::npos) {
      literal_.value.push_back(kValues[known]);
      at_ += 2;
    } else if (letter == '\n') {
      at_ += 2;
    } else if (letter == 'x' || letter == 'u' || letter == 'U') {
      hexadecimal(letter == 'x' ? 2 : letter == 'u' ? 4 : 8);
    } else if (letter >= '0' && letter <= '7') {
      octal();
    } else if (letter == 'N') {
      literal_.error = "unsupported escape \\N";
    } else {
      literal_.value.push_back('\\');
      ++at_;
    }
  }

  void hexadecimal(size_t digits) {
    std::optional<char32_t> code = read_digits(text_, at_ + 2, digits, 16);
    if (!code || *code > 0x10FFFF) {
      literal_.error = concat("invalid escape \\", text_[at_ + 1]);
      return;
    }
    at_ += 2 + digits;
    if (*code >= 0xD800 && *code <= 0xDFFF) code = surrogate(*code);
    text::append_utf8(literal_.value, *code);
  }

  // Half a character: joined with the other half where that follows.
  char32_t surrogate(char32_t high) {
    if (high <= 0xDBFF && text_.substr(at_).starts_with("\\u")) {
      const std::optional<char32_t> low = read_digits(text_, at_ + 2, 4, 16);
      if (low && *low >= 0xDC00 && *low <= 0xDFFF) {
        at_ += 6;
        return 0x10000 + ((high - 0xD800) << 10) + (*low - 0xDC00);
      }
    }
    return text::kReplacementCharacter;
  }

  void octal() {
    size_t digits = 1;
    while (digits < 3 && at_ + 1 + digits < text_.size() && text_[at_ + 1 + digits] >= '0' &&
           text_[at_ + 1 + digits] <= '7') {
      ++digits;
    }
    text::append_utf8(literal_.value, *read_digits(text_, at_ + 1, digits, 8));
    at_ += 1 + digits;
  }

  std::string_view text_;
  size_t at_ = 0;
  StringLiteral literal_;
};

// The length of digits with single underscores between them.
template <class IsDigit>
size_t digits_length(std::string_view text, IsDigit is_digit) {
  size_t at = 0;
  while (at < text.size()) {
    const size_t digit = at > 0 && text[at] == '_' ? at + 1 : at;
    if (digit >= text.size() || !is_digit(text[digit])) break;
    at = digit + 1;
  }
  return at;
}

bool is_decimal_digit(char c) { return c >= '0' && c <= '9'; }

size_t fraction_length(std::string_view text) {
  if (!text.starts_with('.')) return 0;
  const size_t digits = digits_length(text.substr(1), is_decimal_digit);
  return digits == 0 ? 0 : digits + 1;
}

size_t exponent_length(std::string_view text) {
  if (text.empty() || (text[0] != 'e' && text[0] != 'E')) return 0;
  const size_t sign = text.size() > 1 && (text[1] == '+' || text[1] == '-') ? 1 : 0;
  const size_t digits = digits_length(text.substr(1 + sign), is_decimal_digit);
  return digits == 0 ? 0 : 1 + sign + digits;
}

std::string without_underscores(std::string_view text) {
  std::string out(text);
  std::erase(out, '_');
  return out;
}

NumberLiteral integer(std::string_view digits, int base, size_t length) {
  const std::string plain = without_underscores(digits);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(plain.data(), plain.data() + plain.size(), value, base);
  if (error != std::errc()) return {length, {}, "an integer of more than 64 bits"};
  return {length, value, ""};
}

}  // namespace

StringLiteral unescape(std::string_view text) { return Unescaper(normalize_newlines(text)).run(); }

NumberLiteral read_number(std::string_view text, bool after_dot) {
  const size_t whole = digits_length(text, is_decimal_digit);
  if (!after_dot) {
    const size_t fraction = fraction_length(text.substr(whole));
    const size_t exponent = exponent_length(text.substr(whole + fraction));
    if (fraction + exponent > 0) {
      const size_t length = whole + fraction + exponent;
      return {length, std::strtod(without_underscores(text.substr(0, length)).c_str(), nullptr),
              ""};
    }
  }
  if (text[0] != '0') return integer(text.substr(0, whole), 10, whole);

  const char letter = text.size() > 1 ? static_cast<char>(std::tolower(text[1])) : '\0';
  const int base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
  if (base != 10) {
    const auto is_digit = [&](char c) { return read_digits({&c, 1}, 0, 1, base).has_value(); };
    std::string_view digits = text.substr(2);
    const bool underscore = digits.starts_with('_');
    if (underscore) digits.remove_prefix(1);
    const size_t length = digits_length(digits, is_digit);
    if (length > 0) {
      return integer(digits.substr(0, length), base, 2 + (underscore ? 1 : 0) + length);
    }
  }
  return {digits_length(text, [](char c) { return c == '0'; }), int64_t{0}, ""};
}

}  // namespace replayssm::jinja
