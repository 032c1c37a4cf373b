// The flags of bench spec.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace replayssm::cli {

void add_bench_spec(CLI::App& parent, std::function<void()>& command);

}  // namespace replayssm::cli
