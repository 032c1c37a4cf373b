// Templates as tokens. White space control, trim_blocks and lstrip_blocks are applied here.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/jinja/value.h"

namespace replayssm::jinja {

struct Position {
  int line = 1;
  int column = 1;
};

enum class TokenKind {
  kText,      // outside of tags
  kPrint,     // {{
  kPrintEnd,  // }}
  kBlock,     // {%
  kBlockEnd,  // %}
  kName,
  kString,
  kNumber,
  kOperator,
  kEnd
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  Position position;
  std::string text;  // the text, name, string or operator
  Value number;
};

// Throws Error with line and column.
std::vector<Token> tokenize(std::string_view source);

[[noreturn]] void fail_at(Position position, std::string_view message);

}  // namespace replayssm::jinja
