// Which instruction set the CPU code uses. Left alone, it is the widest that both the build and the
// machine have.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace replayssm::cpu {

// What limit_target() takes here, widest first: of avx512 and avx2 those that build and machine
// have, and baseline, what every machine of the kind has.
std::vector<std::string> target_names();

// Makes SIMD code and matrix library use `name` at most, in the whole process: to be called once,
// before the first op. Throws Error for a name that is not offered here.
void limit_target(std::string_view name);

// The one of target_names() that is in use.
std::string target_name();

}  // namespace replayssm::cpu
