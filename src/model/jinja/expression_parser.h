// Expressions of templates.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "model/jinja/ast.h"
#include "model/jinja/token_cursor.h"

namespace replayssm::jinja {

class ExpressionParser : public TokenCursor {
 public:
  using TokenCursor::TokenCursor;

 protected:
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
  ExpressionPtr unary_with_filters();
  ExpressionPtr unary();
  // A chain of operands with `operators` between them.
  ExpressionPtr left_to_right(ExpressionPtr (ExpressionParser::*operand)(),
                              std::initializer_list<std::string_view> operators);
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
};

}  // namespace replayssm::jinja
