#include "model/jinja/expression_parser.h"

#include <array>

#include "core/check.h"

namespace replayssm::jinja {
namespace {

// Bounds the height of a tree too: a + b + c ... is as high as it is long.
constexpr int kNodesPerTag = 2000;

bool is_comparison(const Token& token) {
  constexpr std::string_view kOperators[] = {"==", "!=", "<", "<=", ">", ">="};
  return token.kind == TokenKind::kOperator &&
         std::find(std::begin(kOperators), std::end(kOperators), token.text) !=
             std::end(kOperators);
}

}  // namespace

template <class Node>
ExpressionPtr ExpressionParser::make(Position position, Node node) {
  if (++nodes_in_tag_ > kNodesPerTag) {
    fail_at(position, concat("an expression of more than ", kNodesPerTag, " parts"));
  }
  return std::make_unique<Expression>(Expression{position, std::move(node)});
}

ExpressionPtr ExpressionParser::expression(bool with_condition) {
  const Depth depth(*this);
  ExpressionPtr value = logical_or();
  while (with_condition && at_name("if")) {
    const Position position = next().position;
    ExpressionPtr test = logical_or();
    ExpressionPtr otherwise = skip_name("else") ? expression() : nullptr;
    value = make(position, Conditional{std::move(test), std::move(value), std::move(otherwise)});
  }
  return value;
}

bool ExpressionParser::at_tuple_end(std::string_view stop) const {
  return current().kind == TokenKind::kPrintEnd || current().kind == TokenKind::kBlockEnd ||
         at_operator(")") || (!stop.empty() && at_name(stop));
}

ExpressionPtr ExpressionParser::tuple(bool with_condition, std::string_view stop,
                                      bool in_parentheses) {
  const Position position = current().position;
  std::vector<ExpressionPtr> items;
  bool is_tuple = false;
  while (true) {
    if (!items.empty()) expect_operator(",");
    if (at_tuple_end(stop)) break;
    items.push_back(expression(with_condition));
    if (!at_operator(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && !items.empty()) return std::move(items.front());
  if (!is_tuple && !in_parentheses) fail_unexpected("an expression");
  return make(position, TupleLiteral{std::move(items)});
}

ExpressionPtr ExpressionParser::target(std::string_view stop, bool with_attribute) {
  const Position position = current().position;
  std::vector<ExpressionPtr> items;
  bool is_tuple = false;
  while (true) {
    if (!items.empty()) expect_operator(",");
    if (at_tuple_end(stop)) break;
    const Depth depth(*this);
    const Position place = current().position;
    if (skip_operator("(")) {
      items.push_back(target({}, with_attribute));
      expect_operator(")");
    } else {
      const std::string name = expect_identifier();
      constexpr std::string_view kConstants[] = {"true", "True", "false", "False", "none", "None"};
      if (std::find(std::begin(kConstants), std::end(kConstants), name) != std::end(kConstants)) {
        fail_at(place, concat("cannot assign to '", name, "'"));
      }
      ExpressionPtr item = make(place, Name{name});
      if (with_attribute && skip_operator(".")) {
        item = make(place, Attribute{std::move(item), expect_identifier()});
      }
      items.push_back(std::move(item));
    }
    if (!at_operator(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && !items.empty()) return std::move(items.front());
  if (!is_tuple) fail_unexpected("a name to assign to");
  return make(position, TupleLiteral{std::move(items)});
}

ExpressionPtr ExpressionParser::logical_or() {
  ExpressionPtr left = logical_and();
  while (at_name("or")) {
    const Position position = next().position;
    ExpressionPtr right = logical_and();
    left = make(position, Logical{false, std::move(left), std::move(right)});
  }
  return left;
}

ExpressionPtr ExpressionParser::logical_and() {
  ExpressionPtr left = logical_not();
  while (at_name("and")) {
    const Position position = next().position;
    ExpressionPtr right = logical_not();
    left = make(position, Logical{true, std::move(left), std::move(right)});
  }
  return left;
}

ExpressionPtr ExpressionParser::logical_not() {
  if (!at_name("not")) return comparison();
  const Depth depth(*this);
  const Position position = next().position;
  return make(position, Unary{"not", logical_not()});
}

ExpressionPtr ExpressionParser::comparison() {
  ExpressionPtr first = sum();
  const Position position = current().position;
  std::vector<std::pair<std::string, ExpressionPtr>> rest;
  while (true) {
    std::string operation;
    if (is_comparison(current()) || at_name("in")) {
      operation = next().text;
    } else if (at_name("not") && ahead().kind == TokenKind::kName && ahead().text == "in") {
      next();
      next();
      operation = "not in";
    } else {
      break;
    }
    rest.emplace_back(operation, sum());
  }
  if (rest.empty()) return first;
  return make(position, Comparison{std::move(first), std::move(rest)});
}

ExpressionPtr ExpressionParser::left_to_right(ExpressionPtr (ExpressionParser::*operand)(),
                                              std::initializer_list<std::string_view> operators) {
  ExpressionPtr left = (this->*operand)();
  while (std::any_of(operators.begin(), operators.end(),
                     [&](std::string_view text) { return at_operator(text); })) {
    const Token token = next();
    ExpressionPtr right = (this->*operand)();
    left = make(token.position, Binary{token.text, std::move(left), std::move(right)});
  }
  return left;
}

ExpressionPtr ExpressionParser::sum() {
  return left_to_right(&ExpressionParser::concatenation, {"+", "-"});
}

ExpressionPtr ExpressionParser::concatenation() {
  return left_to_right(&ExpressionParser::product, {"~"});
}

ExpressionPtr ExpressionParser::product() {
  return left_to_right(&ExpressionParser::power, {"*", "/", "//", "%"});
}

ExpressionPtr ExpressionParser::power() {
  return left_to_right(&ExpressionParser::unary_with_filters, {"**"});
}

ExpressionPtr ExpressionParser::unary_with_filters() { return postfix_filters(unary()); }

ExpressionPtr ExpressionParser::unary() {
  const Depth depth(*this);
  ExpressionPtr node;
  if (at_operator("-") || at_operator("+")) {
    const Token token = next();
    node = make(token.position, Unary{token.text, unary()});
  } else {
    node = primary();
  }
  return postfix(std::move(node));
}

ExpressionPtr ExpressionParser::primary() {
  const Position position = current().position;
  switch (current().kind) {
    case TokenKind::kName: return name_or_constant();
    case TokenKind::kString: return string_constant();
    case TokenKind::kNumber: return make(position, Constant{next().number});
    default: break;
  }
  if (skip_operator("(")) {
    ExpressionPtr inner = tuple(true, {}, true);
    expect_operator(")");
    return inner;
  }
  if (at_operator("[")) return list_literal();
  if (at_operator("{")) return dict_literal();
  fail_unexpected("an expression");
}

ExpressionPtr ExpressionParser::name_or_constant() {
  const Token token = next();
  if (token.text == "true" || token.text == "True") return make(token.position, Constant{true});
  if (token.text == "false" || token.text == "False") return make(token.position, Constant{false});
  if (token.text == "none" || token.text == "None") {
    return make(token.position, Constant{Value::none()});
  }
  extras_.varargs = extras_.varargs || token.text == "varargs";
  extras_.kwargs = extras_.kwargs || token.text == "kwargs";
  extras_.caller = extras_.caller || token.text == "caller";
  return make(token.position, Name{token.text});
}

ExpressionPtr ExpressionParser::string_constant() {
  const Position position = current().position;
  std::string text;
  while (current().kind == TokenKind::kString) text += next().text;
  return make(position, Constant{std::move(text)});
}

ExpressionPtr ExpressionParser::list_literal() {
  const Position position = next().position;
  std::vector<ExpressionPtr> items;
  while (!at_operator("]")) {
    if (!items.empty()) expect_operator(",");
    if (at_operator("]")) break;
    items.push_back(expression());
  }
  expect_operator("]");
  return make(position, ListLiteral{std::move(items)});
}

ExpressionPtr ExpressionParser::dict_literal() {
  const Position position = next().position;
  std::vector<std::pair<ExpressionPtr, ExpressionPtr>> items;
  while (!at_operator("}")) {
    if (!items.empty()) expect_operator(",");
    if (at_operator("}")) break;
    ExpressionPtr key = expression();
    expect_operator(":");
    items.emplace_back(std::move(key), expression());
  }
  expect_operator("}");
  return make(position, DictLiteral{std::move(items)});
}

ExpressionPtr ExpressionParser::postfix(ExpressionPtr node) {
  while (true) {
    const Position position = current().position;
    if (at_operator(".") || at_operator("[")) {
      node = subscript(std::move(node));
    } else if (at_operator("(")) {
      node = make(position, Call{std::move(node), call_arguments()});
    } else {
      return node;
    }
  }
}

ExpressionPtr ExpressionParser::postfix_filters(ExpressionPtr node) {
  while (true) {
    const Position position = current().position;
    if (at_operator("|")) {
      node = filters(std::move(node), false);
    } else if (at_name("is")) {
      node = test(std::move(node));
    } else if (at_operator("(")) {
      node = make(position, Call{std::move(node), call_arguments()});
    } else {
      return node;
    }
  }
}

ExpressionPtr ExpressionParser::subscript(ExpressionPtr object) {
  const Token token = next();
  if (token.text == ".") {
    if (current().kind == TokenKind::kNumber && current().number.is<int64_t>()) {
      ExpressionPtr index = make(current().position, Constant{current().number});
      next();
      return make(token.position, Item{std::move(object), std::move(index)});
    }
    return make(token.position, Attribute{std::move(object), expect_identifier()});
  }
  std::vector<ExpressionPtr> indices;
  while (!at_operator("]")) {
    if (!indices.empty()) expect_operator(",");
    indices.push_back(index_or_slice());
  }
  expect_operator("]");
  ExpressionPtr index = indices.size() == 1
                            ? std::move(indices.front())
                            : make(token.position, TupleLiteral{std::move(indices)});
  return make(token.position, Item{std::move(object), std::move(index)});
}

ExpressionPtr ExpressionParser::index_or_slice() {
  const Position position = current().position;
  Slice slice;
  if (!at_operator(":")) {
    slice.begin = expression();
    if (!at_operator(":")) return std::move(slice.begin);
  }
  expect_operator(":");
  const auto ends = [&] { return at_operator("]") || at_operator(","); };
  if (!at_operator(":") && !ends()) slice.end = expression();
  if (skip_operator(":") && !ends()) slice.step = expression();
  return make(position, std::move(slice));
}

CallArguments ExpressionParser::call_arguments() {
  const Depth depth(*this);
  expect_operator("(");
  CallArguments arguments;
  bool first = true;
  while (!at_operator(")")) {
    if (!first) {
      expect_operator(",");
      if (at_operator(")")) break;
    }
    first = false;
    const bool starred = arguments.star != nullptr || arguments.double_star != nullptr;
    if (at_operator("*")) {
      if (starred) fail_here("a second * in a call");
      next();
      arguments.star = expression();
    } else if (at_operator("**")) {
      if (arguments.double_star != nullptr) fail_here("a second ** in a call");
      next();
      arguments.double_star = expression();
    } else if (current().kind == TokenKind::kName && ahead().kind == TokenKind::kOperator &&
               ahead().text == "=") {
      if (arguments.double_star != nullptr) fail_here("a named argument after **");
      std::string name = next().text;
      next();
      arguments.named.emplace_back(std::move(name), expression());
    } else {
      if (starred || !arguments.named.empty()) {
        fail_here("an argument without a name after one with a name");
      }
      arguments.positional.push_back(expression());
    }
  }
  expect_operator(")");
  return arguments;
}

std::string ExpressionParser::dotted_name() {
  std::string name = expect_identifier();
  while (skip_operator(".")) name += "." + expect_identifier();
  return name;
}

ExpressionPtr ExpressionParser::filters(ExpressionPtr input, bool bare) {
  while (bare || at_operator("|")) {
    if (!bare) next();
    bare = false;
    const Position position = current().position;
    std::string name = dotted_name();
    CallArguments arguments = at_operator("(") ? call_arguments() : CallArguments();
    input = make(position, Filter{std::move(input), std::move(name), std::move(arguments)});
  }
  return input;
}

bool ExpressionParser::at_test_argument() const {
  switch (current().kind) {
    case TokenKind::kName: return !at_name("else") && !at_name("or") && !at_name("and");
    case TokenKind::kString:
    case TokenKind::kNumber: return true;
    default: return at_operator("[") || at_operator("{");
  }
}

ExpressionPtr ExpressionParser::test(ExpressionPtr input) {
  const Position position = next().position;
  const bool negated = skip_name("not");
  std::string name = dotted_name();
  CallArguments arguments;
  if (at_operator("(")) {
    arguments = call_arguments();
  } else if (at_test_argument()) {
    if (at_name("is")) fail_here("tests cannot be chained with is");
    arguments.positional.push_back(postfix(primary()));
  }
  ExpressionPtr node =
      make(position, Test{std::move(input), std::move(name), std::move(arguments)});
  if (negated) node = make(position, Unary{"not", std::move(node)});
  return node;
}

}  // namespace replayssm::jinja
