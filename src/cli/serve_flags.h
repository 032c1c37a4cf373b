// The command lines of the server and of its benchmark.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace replayssm::cli {

using Command = std::function<void()>;

void add_serve(CLI::App& parent, Command& command);
void add_bench_serve(CLI::App& parent, Command& command);

}  // namespace replayssm::cli
