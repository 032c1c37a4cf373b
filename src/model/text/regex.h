// Regular expressions through PCRE2 with JIT, with Unicode properties.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

struct pcre2_real_code_8;

namespace replayssm::text {

// `pattern` in the dialect of Oniguruma's Ruby syntax, which tokenizer.json uses, in the one of
// PCRE2. Throws Error for constructs that PCRE2 would read differently and that cannot be
// rewritten.
std::string oniguruma_to_pcre2(std::string_view pattern);

class Regex {
 public:
  // Throws Error for a pattern that does not compile.
  static Regex from_oniguruma(std::string_view pattern);
  static Regex from_literal(std::string_view text);

  struct Match {
    size_t begin = 0;
    size_t end = 0;
  };

  // What one thread needs to search; refers to the regex.
  class Matcher {
   public:
    explicit Matcher(const Regex& regex);
    ~Matcher();
    Matcher(Matcher&&) noexcept;

    // The first match that begins at or after `start`. `subject` is valid UTF-8.
    std::optional<Match> search(std::string_view subject, size_t start);

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

 private:
  Regex(std::string_view pattern, unsigned options, std::string_view shown);

  std::shared_ptr<pcre2_real_code_8> code_;
};

}  // namespace replayssm::text
