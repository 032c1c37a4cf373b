// The flags of replayssm bench accuracy --precision-sweep.
#pragma once

#include "cli/bench_accuracy.h"

namespace CLI {
class App;
}

namespace replayssm::cli {

// `app` has the other flags of the command already. most_buffer: the longest buffer.
void add_sweep_flags(CLI::App& app, AccuracyOptions& options, int64_t most_buffer);

}  // namespace replayssm::cli
