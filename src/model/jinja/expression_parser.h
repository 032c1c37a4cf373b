// Expressions of templates, and the token stream that statements share with them.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "model/jinja/ast.h"

namespace replayssm::jinja {

class ExpressionParser {
 public:
  explicit ExpressionParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

 protected:
  // Counts how deep the parser is, so that no template overflows the stack.
  class Depth {
   public:
    explicit Depth(ExpressionParser& parser);
    ~Depth() { --parser_.depth_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;

   private:
    ExpressionParser& parser_;
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

  ExpressionPtr expression(bool with_condition = true);
  // An expression, or a tuple where commas follow. Ends at a tag's end, ")" or the name `stop`.
  ExpressionPtr tuple(bool with_condition = true, std::string_view stop = {},
                      bool in_parentheses = false);
  // The names that make a macro take more than its parameters, as far as they occurred.
  MacroExtras extras_;

  // What may stand on the left of an assignment.
  ExpressionPtr target(std::string_view stop, bool with_attribute);
  // The chain of filters after `input`; with `bare` the first one stands without its "|".
  ExpressionPtr filters(ExpressionPtr input, bool bare);

 private:
  template <class Node>
  ExpressionPtr make(Position position, Node node);
  ExpressionPtr logical_or();
  ExpressionPtr logical_and();
  ExpressionPtr logical_not();
  ExpressionPtr comparison();
  ExpressionPtr sum();
  ExpressionPtr concatenation();
  ExpressionPtr product();
  ExpressionPtr power();
  ExpressionPtr unary(bool with_filters = true);
  ExpressionPtr primary();
  ExpressionPtr name_or_constant();
  ExpressionPtr string_constant();
  ExpressionPtr list_literal();
  ExpressionPtr dict_literal();
  ExpressionPtr postfix(ExpressionPtr node);
  ExpressionPtr postfix_filters(ExpressionPtr node);
  ExpressionPtr subscript(ExpressionPtr object);
  ExpressionPtr index_or_slice();
  ExpressionPtr test(ExpressionPtr input);
  CallArguments call_arguments();
  std::string dotted_name();
  bool at_tuple_end(std::string_view stop) const;
  bool at_test_argument() const;

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  int nodes_in_tag_ = 0;
};

}  // namespace replayssm::jinja
