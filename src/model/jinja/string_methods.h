// Methods of str.
#pragma once

#include <string_view>

#include "model/jinja/builtins.h"

namespace replayssm::jinja {

using StringMethod = Value (*)(Interpreter&, const std::string& text, Arguments arguments);

// Null for unknown names.
StringMethod find_string_method(std::string_view name);

// Python's strip: the characters of `which`, or white space when it is none.
std::string strip(std::string_view text, const Value& which, bool left, bool right);
std::string replace_all(Interpreter& interpreter, std::string_view text, std::string_view from,
                        std::string_view to, int64_t limit);
// Padded on both sides as str.center pads.
std::string center(Interpreter& interpreter, std::string_view text, int64_t width,
                   std::string_view fill);

}  // namespace replayssm::jinja
