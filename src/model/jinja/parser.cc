#include "model/jinja/parser.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "model/jinja/expression_parser.h"

namespace replayssm::jinja {
namespace {

class Parser : public ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  Body parse() {
    Body body = statements({});
    return body;
  }

 private:
  using Names = std::initializer_list<std::string_view>;

  // Statements up to a tag named in `ends`, whose name is the current token afterwards; up to the
  // end of the template when there are none.
  Body statements(Names ends) {
    const Depth depth(*this);
    Body body;
    while (true) {
      const Token token = current();
      switch (token.kind) {
        case TokenKind::kText:
          next();
          body.push_back({token.position, Text{token.text}});
          break;
        case TokenKind::kPrint:
          next();
          body.push_back({token.position, Print{tuple()}});
          expect(TokenKind::kPrintEnd);
          break;
        case TokenKind::kBlock:
          next();
          if (std::find_if(ends.begin(), ends.end(), [&](auto end) { return at_name(end); }) !=
              ends.end()) {
            return body;
          }
          statement(body);
          expect(TokenKind::kBlockEnd);
          break;
        default:
          if (ends.size() > 0) fail_unexpected(concat("'", *(ends.end() - 1), "'"));
          return body;
      }
    }
  }

  // The body of a tag: the rest of the tag, and statements up to one of `ends`.
  Body block(Names ends) {
    skip_operator(":");
    expect(TokenKind::kBlockEnd);
    return statements(ends);
  }

  Body block_until(std::string_view end) {
    Body body = block({end});
    next();
    return body;
  }

  void statement(Body& body) {
    const Position position = current().position;
    if (current().kind != TokenKind::kName) fail_unexpected("the name of a tag");
    const std::string name = next().text;
    const auto add = [&](auto node) { body.push_back({position, std::move(node)}); };
    if (name == "if") return add(if_statement());
    if (name == "for") return add(for_statement());
    if (name == "set") return set_statement(body, position);
    if (name == "macro") return add(macro_statement());
    if (name == "call") return add(call_block());
    if (name == "filter") return add(filter_block());
    if (name == "with") return add(with_statement());
    if (name == "print") return print_statement(body, position);
    if (name == "generation") return add(Scope{block_until("endgeneration")});
    if (name == "break" || name == "continue") {
      if (loops_ == 0) fail_at(position, concat("'", name, "' outside of a loop"));
      return name == "break" ? add(Break{}) : add(Continue{});
    }
    fail_at(position, concat("unknown or unsupported tag '", name, "'"));
  }

  If if_statement() {
    If node;
    ExpressionPtr test = tuple(false);
    while (true) {
      node.branches.emplace_back(std::move(test), block({"elif", "else", "endif"}));
      const std::string end = next().text;
      if (end == "elif") {
        test = tuple(false);
        continue;
      }
      if (end == "else") node.otherwise = block_until("endif");
      return node;
    }
  }

  For for_statement() {
    For node;
    node.target = target("in", false);
    check_not_loop(*node.target);
    expect_name("in");
    node.iterable = tuple(false, "recursive");
    if (skip_name("if")) node.condition = expression();
    if (at_name("recursive")) fail_here("recursive loops are not supported");
    ++loops_;
    node.body = block({"else", "endfor"});
    --loops_;
    if (next().text == "else") node.otherwise = block_until("endfor");
    return node;
  }

  void check_not_loop(const Expression& target) const {
    const auto* name = std::get_if<Name>(&target.node);
    if (name != nullptr && name->name == "loop") {
      fail_at(target.position, "cannot assign to the variable 'loop' in a for loop");
    }
  }

  void set_statement(Body& body, Position position) {
    ExpressionPtr place = target({}, true);
    if (skip_operator("=")) {
      body.push_back({position, Set{std::move(place), tuple()}});
      return;
    }
    ExpressionPtr chain = at_operator("|") ? filters(nullptr, false) : nullptr;
    body.push_back({position, SetBlock{std::move(place), std::move(chain), block_until("endset")}});
  }

  std::vector<Parameter> parameters() {
    std::vector<Parameter> out;
    expect_operator("(");
    while (!at_operator(")")) {
      if (!out.empty()) expect_operator(",");
      Parameter parameter{expect_identifier(), nullptr};
      const bool duplicate = std::any_of(out.begin(), out.end(), [&](const Parameter& other) {
        return other.name == parameter.name;
      });
      if (duplicate) fail_here(concat("a second parameter '", parameter.name, "'"));
      if (skip_operator("=")) {
        parameter.fallback = expression();
      } else if (!out.empty() && out.back().fallback != nullptr) {
        fail_here("a parameter without a default after one with a default");
      }
      out.push_back(std::move(parameter));
    }
    expect_operator(")");
    return out;
  }

  // The body of a macro is not inside of the loops around it.
  void macro_body(Macro& macro, std::string_view end) {
    const int loops = std::exchange(loops_, 0);
    const MacroExtras outer = std::exchange(extras_, {});
    macro.body = block_until(end);
    macro.extras = std::exchange(extras_, outer);
    loops_ = loops;
  }

  Macro macro_statement() {
    Macro node;
    node.name = expect_identifier();
    node.parameters = parameters();
    macro_body(node, "endmacro");
    return node;
  }

  CallBlock call_block() {
    CallBlock node;
    node.caller.name = "caller";
    if (at_operator("(")) node.caller.parameters = parameters();
    node.call = expression();
    if (!std::holds_alternative<Call>(node.call->node)) {
      fail_at(node.call->position, "expected a call");
    }
    macro_body(node.caller, "endcall");
    return node;
  }

  FilterBlock filter_block() {
    ExpressionPtr chain = filters(nullptr, true);
    return {std::move(chain), block_until("endfilter")};
  }

  With with_statement() {
    With node;
    while (current().kind != TokenKind::kBlockEnd) {
      if (!node.bindings.empty()) expect_operator(",");
      ExpressionPtr place = target({}, false);
      expect_operator("=");
      node.bindings.emplace_back(std::move(place), expression());
    }
    node.body = block_until("endwith");
    return node;
  }

  void print_statement(Body& body, Position position) {
    bool first = true;
    while (current().kind != TokenKind::kBlockEnd) {
      if (!first) expect_operator(",");
      first = false;
      body.push_back({position, Print{expression()}});
    }
  }

  int loops_ = 0;
};

}  // namespace

Body parse(std::string_view source) { return Parser(tokenize(source)).parse(); }

}  // namespace replayssm::jinja
