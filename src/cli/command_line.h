// The program's arguments.
#pragma once

#include <functional>

namespace replayssm::cli {

// Parses the arguments and returns what to do. Help and version texts are printed, with nothing
// left to do. Throws Error for arguments that are unknown, missing or out of range.
std::function<void()> parse_command_line(int argc, const char* const* argv);

}  // namespace replayssm::cli
