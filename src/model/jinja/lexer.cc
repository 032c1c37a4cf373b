#include "model/jinja/lexer.h"

#include <algorithm>
#include <cctype>
#include <optional>

#include "core/check.h"
#include "model/jinja/string_literal.h"
#include "model/jinja/unicode.h"
#include "model/text/utf8.h"

namespace replayssm::jinja {
namespace {

constexpr std::string_view kOperators[] = {"**", "//", "==", "!=", ">=", "<=", "+", "-", "/",
                                           "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                           ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};

// Line ends become \n; one at the very end is dropped.
std::string normalize_lines(std::string_view source) {
  std::string out = normalize_newlines(source);
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(normalize_lines(text::to_valid_utf8(source))) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) template_text();
    emit(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const { return std::string_view(source_).substr(at_); }
  bool next_is(std::string_view text) const { return rest().starts_with(text); }

  void advance(size_t count) {
    for (const size_t end = at_ + count; at_ < end; ++at_) {
      if (source_[at_] == '\n') {
        position_ = {position_.line + 1, 1};
      } else if ((static_cast<unsigned char>(source_[at_]) & 0xC0) != 0x80) {
        ++position_.column;
      }
    }
  }

  void emit(TokenKind kind, std::string text) { tokens_.push_back({kind, position_, text, {}}); }

  void skip_white_space() { advance(white_space_at_start(rest())); }

  // Text up to the next tag, then that tag.
  void template_text() {
    size_t tag = at_;
    while (true) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos || tag + 1 == source_.size()) {
        emit(TokenKind::kText, std::string(rest()));
        advance(source_.size() - at_);
        return;
      }
      if (std::string_view("%{#").find(source_[tag + 1]) != std::string_view::npos) break;
      ++tag;
    }
    const char kind = source_[tag + 1];
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    const bool signed_tag = sign == '-' || sign == '+';
    text_before_tag(tag, kind, signed_tag ? sign : '\0');
    line_starting_ = false;
    if (kind == '%' && raw_block()) return;
    const Position start = position_;
    if (kind != '#') emit(kind == '%' ? TokenKind::kBlock : TokenKind::kPrint, "");
    advance(signed_tag ? 3 : 2);
    if (kind == '#') {
      comment(start);
    } else {
      code(kind, start);
    }
  }

  void text_before_tag(size_t tag, char kind, char sign) {
    std::string_view text = std::string_view(source_).substr(at_, tag - at_);
    if (sign == '-') {
      text = text.substr(0, white_space_at_end(text));
    } else if (sign != '+' && kind != '{') {
      const size_t newline = text.rfind('\n');
      const size_t line = newline == std::string_view::npos ? 0 : newline + 1;
      const std::string_view indent = text.substr(line);
      if ((line > 0 || line_starting_) && white_space_at_start(indent) == indent.size()) {
        text = text.substr(0, line);
      }
    }
    if (!text.empty()) emit(TokenKind::kText, std::string(text));
    advance(tag - at_);
  }

  // After a tag: `end` and what its sign, or trim_blocks, removes. False when it is not there.
  bool close(std::string_view end, bool trims) {
    const char sign = at_ < source_.size() ? source_[at_] : '\0';
    const bool minus = sign == '-', plus = sign == '+' && trims;
    if (rest().substr(minus || plus ? 1 : 0).substr(0, end.size()) != end) return false;
    const size_t begin = at_;
    advance(end.size() + (minus || plus ? 1 : 0));
    if (minus) {
      skip_white_space();
    } else if (!plus && trims && next_is("\n")) {
      advance(1);
    }
    line_starting_ = at_ > begin && source_[at_ - 1] == '\n';
    return true;
  }

  void comment(Position start) {
    while (at_ < source_.size()) {
      const size_t candidate = std::min(source_.find_first_of("+-#", at_), source_.size());
      advance(candidate - at_);
      if (at_ < source_.size()) {
        if (close("#}", true)) return;
        advance(1);
      }
    }
    fail_at(start, "missing end of comment");
  }

  // {% raw %} ... {% endraw %}: false, and nothing read, when it is another tag.
  bool raw_block() {
    const std::optional<size_t> length = raw_tag_length(at_, "raw");
    if (!length) return false;
    const Position start = position_;
    const size_t content_start = at_ + *length;
    advance(*length);
    for (size_t tag = source_.find("{%", content_start); tag != std::string::npos;
         tag = source_.find("{%", tag + 1)) {
      size_t at = tag + 2;
      const char sign = at < source_.size() ? source_[at] : '\0';
      if (sign == '-' || sign == '+') ++at;
      at += white_space_at_start(std::string_view(source_).substr(at));
      if (source_.compare(at, 6, "endraw") != 0) continue;
      at += 6;
      at += white_space_at_start(std::string_view(source_).substr(at));
      const std::string_view after = std::string_view(source_).substr(at);
      if (!after.starts_with("%}") && !after.starts_with("-%}") && !after.starts_with("+%}")) {
        continue;
      }
      line_starting_ = source_[content_start - 1] == '\n';
      text_before_tag(tag, '%', sign == '-' || sign == '+' ? sign : '\0');
      advance(at - at_);
      close("%}", true);
      return true;
    }
    fail_at(start, "missing end of raw block");
  }

  // The length of "{% name %}" at `at`, white space after "-%}" included.
  std::optional<size_t> raw_tag_length(size_t at, std::string_view name) const {
    const std::string_view all = source_;
    const size_t begin = at;
    at += 2;
    if (at < all.size() && (all[at] == '-' || all[at] == '+')) ++at;
    at += white_space_at_start(all.substr(std::min(at, all.size())));
    if (!all.substr(std::min(at, all.size())).starts_with(name)) return std::nullopt;
    at += name.size();
    at += white_space_at_start(all.substr(at));
    if (all.substr(at).starts_with("%}")) return at + 2 - begin;
    if (!all.substr(at).starts_with("-%}")) return std::nullopt;
    at += 3;
    return at + white_space_at_start(all.substr(at)) - begin;
  }

  // The inside of {{ }} or {% %}.
  void code(char kind, Position start) {
    const bool block = kind == '%';
    std::vector<char> open;
    while (true) {
      if (open.empty()) {
        const Position end = position_;
        if (close(block ? "%}" : "}}", block)) {
          tokens_.push_back({block ? TokenKind::kBlockEnd : TokenKind::kPrintEnd, end, "", {}});
          return;
        }
      }
      skip_white_space();
      if (at_ >= source_.size()) fail_at(start, "the tag has no end");
      if (open.empty() && (next_is(block ? "%}" : "}}") || next_is(block ? "-%}" : "-}}") ||
                           (block && next_is("+%}")))) {
        continue;
      }
      if (!number() && !name() && !string()) operation(open);
    }
  }

  bool number() {
    if (!std::isdigit(static_cast<unsigned char>(source_[at_]))) return false;
    const NumberLiteral literal = read_number(rest(), at_ > 0 && source_[at_ - 1] == '.');
    if (!literal.error.empty()) fail_at(position_, literal.error);
    tokens_.push_back(
        {TokenKind::kNumber, position_, source_.substr(at_, literal.length), literal.value});
    advance(literal.length);
    return true;
  }

  bool name() {
    const size_t length = name_length(rest());
    if (length == 0) return false;
    if (!is_name_start(text::decode_utf8(source_, at_).code)) {
      fail_at(position_, "invalid character in a name");
    }
    emit(TokenKind::kName, source_.substr(at_, length));
    advance(length);
    return true;
  }

  bool string() {
    const char quote = source_[at_];
    if (quote != '\'' && quote != '"') return false;
    size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail_at(position_, "the string has no end");
    StringLiteral literal = unescape(rest().substr(1, end - at_ - 1));
    if (!literal.error.empty()) fail_at(position_, literal.error);
    emit(TokenKind::kString, std::move(literal.value));
    advance(end + 1 - at_);
    return true;
  }

  void operation(std::vector<char>& open) {
    const auto found = std::find_if(std::begin(kOperators), std::end(kOperators),
                                    [&](std::string_view text) { return next_is(text); });
    if (found == std::end(kOperators)) {
      const text::Utf8Character character = text::decode_utf8(source_, at_);
      fail_at(position_, concat("unexpected character '", rest().substr(0, character.length), "'"));
    }
    if (*found == "{" || *found == "(" || *found == "[") {
      open.push_back(*found == "{" ? '}' : *found == "(" ? ')' : ']');
    } else if (*found == "}" || *found == ")" || *found == "]") {
      if (open.empty() || open.back() != found->front()) {
        fail_at(position_, concat("unexpected '", *found, "'"));
      }
      open.pop_back();
    }
    emit(TokenKind::kOperator, std::string(*found));
    advance(found->size());
  }

  const std::string source_;
  size_t at_ = 0;
  Position position_;
  bool line_starting_ = true;  // what was read last ended a line
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

void fail_at(Position position, std::string_view message) {
  fail("chat template: line ", position.line, ", column ", position.column, ": ", message);
}

}  // namespace replayssm::jinja
