// The command lines of the server and of its benchmark.
#pragma once

#include "cli/flags.h"

namespace replayssm::cli {

void add_serve(CLI::App& parent, Command& command);
void add_bench_serve(CLI::App& parent, Command& command);

}  // namespace replayssm::cli
