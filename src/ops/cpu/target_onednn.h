// Keeps the matrix library to the instruction set that SIMD code is limited to.
#pragma once

#include <string_view>

namespace replayssm::cpu {

// `name`: one of target_names(). Throws Error where the library cannot change any more.
void limit_onednn(std::string_view name);

}  // namespace replayssm::cpu
