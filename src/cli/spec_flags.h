// The flags of bench spec.
#pragma once

#include "cli/flags.h"

namespace replayssm::cli {

void add_bench_spec(CLI::App& parent, Command& command);

}  // namespace replayssm::cli
