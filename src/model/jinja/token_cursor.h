// The tokens of a template as a parser goes over them.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "model/jinja/lexer.h"

namespace replayssm::jinja {

class TokenCursor {
 public:
  explicit TokenCursor(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

 protected:
  // Counts how deep the parser is, so that no template overflows the stack.
  class Depth {
   public:
    explicit Depth(TokenCursor& cursor);
    ~Depth() { --cursor_.depth_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;

   private:
    TokenCursor& cursor_;
  };

  const Token& current() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token next();
  bool at_operator(std::string_view text) const;
  bool at_name(std::string_view text) const;
  bool skip_operator(std::string_view text);
  bool skip_name(std::string_view text);
  void expect_operator(std::string_view text);
  void expect_name(std::string_view text);
  std::string expect_identifier();
  void expect(TokenKind kind);
  [[noreturn]] void fail_here(std::string_view message) const;
  [[noreturn]] void fail_unexpected(std::string_view expected) const;

  int nodes_in_tag_ = 0;  // of the tree, since the tag began

 private:
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace replayssm::jinja
