// Templates as syntax trees.
#pragma once

#include <string_view>

#include "model/jinja/ast.h"

namespace replayssm::jinja {

// Throws Error with line and column.
Body parse(std::string_view source);

}  // namespace replayssm::jinja
