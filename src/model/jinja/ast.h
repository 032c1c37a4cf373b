// The syntax tree of a template.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "model/jinja/lexer.h"
#include "model/jinja/value.h"

namespace replayssm::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

struct CallArguments {
  std::vector<ExpressionPtr> positional;
  std::vector<std::pair<std::string, ExpressionPtr>> named;
  ExpressionPtr star;         // *list, may be null
  ExpressionPtr double_star;  // **dict, may be null
};

struct Constant {
  Value value;
};
struct Name {
  std::string name;
};
struct ListLiteral {
  std::vector<ExpressionPtr> items;
};
struct TupleLiteral {
  std::vector<ExpressionPtr> items;
};
struct DictLiteral {
  std::vector<std::pair<ExpressionPtr, ExpressionPtr>> items;
};
struct Unary {
  std::string operation;  // - + not
  ExpressionPtr operand;
};
struct Binary {
  std::string operation;  // + - * / // % ** ~
  ExpressionPtr left, right;
};
struct Logical {
  bool is_and;
  ExpressionPtr left, right;
};
struct Comparison {
  ExpressionPtr first;
  std::vector<std::pair<std::string, ExpressionPtr>> rest;  // == != < <= > >= in "not in"
};
struct Conditional {
  ExpressionPtr test, then;
  ExpressionPtr otherwise;  // may be null
};
struct Attribute {
  ExpressionPtr object;
  std::string name;
};
struct Item {
  ExpressionPtr object, index;
};
struct Slice {  // each may be null
  ExpressionPtr begin, end, step;
};
struct Call {
  ExpressionPtr callee;
  CallArguments arguments;
};
struct Filter {
  ExpressionPtr input;  // null: the body of a block
  std::string name;
  CallArguments arguments;
};
struct Test {
  ExpressionPtr input;
  std::string name;
  CallArguments arguments;
};

struct Expression {
  Position position;
  std::variant<Constant, Name, ListLiteral, TupleLiteral, DictLiteral, Unary, Binary, Logical,
               Comparison, Conditional, Attribute, Item, Slice, Call, Filter, Test>
      node;
};

struct Statement;
using Body = std::vector<Statement>;

struct Text {
  std::string text;
};
struct Print {
  ExpressionPtr value;
};
struct If {
  std::vector<std::pair<ExpressionPtr, Body>> branches;
  Body otherwise;
};
struct For {
  ExpressionPtr target, iterable;
  ExpressionPtr condition;  // may be null
  Body body, otherwise;
};
struct Set {
  ExpressionPtr target, value;
};
struct SetBlock {
  ExpressionPtr target;
  ExpressionPtr filter;  // a chain that ends in a null input; may be null
  Body body;
};
struct Parameter {
  std::string name;
  ExpressionPtr fallback;  // may be null
};
struct MacroExtras {
  bool varargs = false, kwargs = false, caller = false;
};
struct Macro {
  std::string name;
  std::vector<Parameter> parameters;
  MacroExtras extras;  // which of these the body mentions, and so accepts
  Body body;
};
struct CallBlock {
  Macro caller;
  ExpressionPtr call;
};
struct FilterBlock {
  ExpressionPtr filter;
  Body body;
};
struct With {
  std::vector<std::pair<ExpressionPtr, ExpressionPtr>> bindings;
  Body body;
};
struct Scope {  // a body whose assignments stay inside: {% generation %}
  Body body;
};
struct Break {};
struct Continue {};

struct Statement {
  Position position;
  std::variant<Text, Print, If, For, Set, SetBlock, Macro, CallBlock, FilterBlock, With, Scope,
               Break, Continue>
      node;
};

}  // namespace replayssm::jinja
