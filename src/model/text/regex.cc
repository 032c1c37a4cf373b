#define PCRE2_CODE_UNIT_WIDTH 8
#include "model/text/regex.h"

#include <pcre2.h>

#include <charconv>
#include <utility>

#include "core/check.h"

namespace replayssm::text {
namespace {

constexpr size_t kJitStackStart = 32 << 10;
constexpr size_t kJitStackLimit = 64 << 20;

// Both engines know these escapes, with different meanings. In and outside of a class; an empty
// one cannot be written there.
struct Escape {
  char letter;
  const char* outside;
  const char* in_class;
};
constexpr Escape kEscapes[] = {
    {'s', R"(\p{White_Space})", R"(\p{White_Space})"},
    {'S', R"(\P{White_Space})", R"(\P{White_Space})"},
    {'w', R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}])", R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})"},
    {'W', R"([^\p{Alphabetic}\p{M}\p{Nd}\p{Pc}])", ""},
    {'h', "[0-9a-fA-F]", "0-9a-fA-F"},
    {'H', "[^0-9a-fA-F]", ""},
};

class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  std::string run() {
    while (at_ < pattern_.size()) {
      if (peek() == '\\') {
        escape();
      } else if (in_class_) {
        class_character();
      } else if (peek() == '[') {
        open_class();
      } else if (peek() == '{') {
        interval();
      } else {
        copy(1);
      }
    }
    return std::move(out_);
  }

 private:
  char peek() const { return pattern_[at_]; }
  bool next_is(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }
  void copy(size_t count) {
    out_.append(pattern_.substr(at_, count));
    at_ += count;
  }
  [[noreturn]] void refuse(const char* what) const {
    fail("regular expression: unsupported ", what, " at character ", at_ + 1, " of ", pattern_);
  }

  void escape() {
    const char letter = at_ + 1 < pattern_.size() ? pattern_[at_ + 1] : '\0';
    for (const Escape& known : kEscapes) {
      if (letter != known.letter) continue;
      const std::string_view replacement = in_class_ ? known.in_class : known.outside;
      if (replacement.empty()) refuse("negated class inside a class");
      out_ += replacement;
      at_ += 2;
      return;
    }
    copy(2);
  }

  void open_class() {
    in_class_ = true;
    copy(next_is("[^") ? 2 : 1);
    if (at_ < pattern_.size() && peek() == ']') copy(1);
  }

  void class_character() {
    if (next_is("&&")) refuse("class intersection");
    if (peek() == '[') {
      if (!next_is("[:")) refuse("class inside a class");
      const size_t end = pattern_.find(":]", at_);
      if (end == std::string_view::npos) refuse("class inside a class");
      copy(end + 2 - at_);
      return;
    }
    if (peek() == ']') in_class_ = false;
    copy(1);
  }

  // x{n,m}+ repeats the interval here and is possessive in PCRE2.
  void interval() {
    const size_t close = pattern_.find('}', at_);
    if (close == std::string_view::npos || close + 1 == pattern_.size() ||
        pattern_[close + 1] != '+') {
      copy(1);
      return;
    }
    const std::string_view body = pattern_.substr(at_ + 1, close - at_ - 1);
    const size_t comma = body.find(',');
    unsigned low = 0, high = 0;
    const auto number = [](std::string_view digits, unsigned& value) {
      const auto [end, error] =
          std::from_chars(digits.data(), digits.data() + digits.size(), value);
      return error == std::errc() && end == digits.data() + digits.size();
    };
    const bool whole = comma != std::string_view::npos && number(body.substr(0, comma), low) &&
                       number(body.substr(comma + 1), high) && low >= 1 && high + 1 >= 2 * low;
    if (!whole) refuse("repeated interval");
    out_ += concat("{", low, ",}");
    at_ = close + 2;
  }

  std::string_view pattern_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::string out_;
};

std::string error_text(int code) {
  PCRE2_UCHAR message[256];
  pcre2_get_error_message(code, message, sizeof message);
  return reinterpret_cast<const char*>(message);
}

}  // namespace

std::string oniguruma_to_pcre2(std::string_view pattern) { return Translator(pattern).run(); }

Regex Regex::from_oniguruma(std::string_view pattern) {
  return Regex(oniguruma_to_pcre2(pattern), PCRE2_MULTILINE, pattern);
}

Regex Regex::from_literal(std::string_view text) { return Regex(text, PCRE2_LITERAL, text); }

Regex::Regex(std::string_view pattern, unsigned options, std::string_view shown) {
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  const unsigned unicode =
      options & PCRE2_LITERAL ? PCRE2_UTF : PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C;
  int error = 0;
  PCRE2_SIZE offset = 0;
  code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                            options | unicode, &error, &offset, context.get()),
              pcre2_code_free);
  if (code_ == nullptr) {
    fail("regular expression: ", error_text(error), " at character ", offset + 1, " of ", shown);
  }
  // Where JIT is not available the same pattern is interpreted.
  pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
}

struct Regex::Matcher::State {
  const pcre2_code* code;
  pcre2_match_data* data = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;

  ~State() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
};

Regex::Matcher::Matcher(const Regex& regex) : state_(new State{regex.code_.get()}) {
  state_->data = pcre2_match_data_create(1, nullptr);
  state_->context = pcre2_match_context_create(nullptr);
  state_->stack = pcre2_jit_stack_create(kJitStackStart, kJitStackLimit, nullptr);
  if (state_->data == nullptr || state_->context == nullptr) fail("out of memory for a search");
  pcre2_jit_stack_assign(state_->context, nullptr, state_->stack);
}
Regex::Matcher::~Matcher() = default;
Regex::Matcher::Matcher(Matcher&&) noexcept = default;

std::optional<Regex::Match> Regex::Matcher::search(std::string_view subject, size_t start) {
  const auto match = [&](unsigned options) {
    // PCRE2 takes no null subject, not even an empty one.
    const char* text = subject.empty() ? "" : subject.data();
    return pcre2_match(state_->code, reinterpret_cast<PCRE2_SPTR>(text), subject.size(), start,
                       options | PCRE2_NO_UTF_CHECK, state_->data, state_->context);
  };
  int result = match(0);
  if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = match(PCRE2_NO_JIT);
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (result < 0)
    fail("regular expression: ", error_text(result), " in a text of ", subject.size(), " bytes");
  const PCRE2_SIZE* span = pcre2_get_ovector_pointer(state_->data);
  // \K can move the beginning anywhere.
  if (span[0] < start || span[1] < span[0]) fail("regular expression: a match that goes backwards");
  return Match{span[0], span[1]};
}

}  // namespace replayssm::text
