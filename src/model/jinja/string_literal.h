// String and number literals of templates.
#pragma once

#include <string>
#include <string_view>

#include "model/jinja/value.h"

namespace replayssm::jinja {

struct StringLiteral {
  std::string value;
  std::string error;  // empty when there is none
};

// The value of a string from the text between its quotes, by Python's escapes.
StringLiteral unescape(std::string_view text);

struct NumberLiteral {
  size_t length = 0;
  Value value;
  std::string error;
};

// The number that `text`, which begins with a digit, begins with. After a dot (x.0.1) it is an
// integer.
NumberLiteral read_number(std::string_view text, bool after_dot);

}  // namespace replayssm::jinja
