#include "model/jinja/token_cursor.h"

#include "core/check.h"

namespace replayssm::jinja {
namespace {

constexpr int kDepthLimit = 100;

std::string describe(const Token& token) {
  switch (token.kind) {
    case TokenKind::kText: return "template text";
    case TokenKind::kPrint: return "{{";
    case TokenKind::kPrintEnd: return "}}";
    case TokenKind::kBlock: return "{%";
    case TokenKind::kBlockEnd: return "%}";
    case TokenKind::kEnd: return "the end of the template";
    case TokenKind::kString: return "a string";
    default: return "'" + token.text + "'";
  }
}

}  // namespace

TokenCursor::Depth::Depth(TokenCursor& cursor) : cursor_(cursor) {
  if (cursor.depth_ >= kDepthLimit) {
    cursor.fail_here(concat("nested more than ", kDepthLimit, " deep"));
  }
  ++cursor_.depth_;
}

Token TokenCursor::next() {
  const Token token = current();
  if (at_ + 1 < tokens_.size()) ++at_;
  if (token.kind == TokenKind::kBlock || token.kind == TokenKind::kPrint) nodes_in_tag_ = 0;
  return token;
}

bool TokenCursor::at_operator(std::string_view text) const {
  return current().kind == TokenKind::kOperator && current().text == text;
}

bool TokenCursor::at_name(std::string_view text) const {
  return current().kind == TokenKind::kName && current().text == text;
}

bool TokenCursor::skip_operator(std::string_view text) {
  if (!at_operator(text)) return false;
  next();
  return true;
}

bool TokenCursor::skip_name(std::string_view text) {
  if (!at_name(text)) return false;
  next();
  return true;
}

void TokenCursor::expect_operator(std::string_view text) {
  if (!skip_operator(text)) fail_unexpected(concat("'", text, "'"));
}

void TokenCursor::expect_name(std::string_view text) {
  if (!skip_name(text)) fail_unexpected(concat("'", text, "'"));
}

std::string TokenCursor::expect_identifier() {
  if (current().kind != TokenKind::kName) fail_unexpected("a name");
  return next().text;
}

void TokenCursor::expect(TokenKind kind) {
  if (current().kind != kind) fail_unexpected(describe({kind, {}, {}, {}}));
  next();
}

void TokenCursor::fail_here(std::string_view message) const {
  fail_at(current().position, message);
}

void TokenCursor::fail_unexpected(std::string_view expected) const {
  fail_here(concat("expected ", expected, ", got ", describe(current())));
}

}  // namespace replayssm::jinja
