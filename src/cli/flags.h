// The flags that several commands share, and how flags are made.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "cli/options.h"

namespace replayssm::cli {

using Names = std::vector<std::string>;
using Command = std::function<void()>;  // what a command line asks for

constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostThreads = 1024;
constexpr int64_t kMostSequences = 1 << 16;
constexpr int64_t kMostBuffer = 4096;  // rows
constexpr int64_t kMostWindow = 1 << 16;

DType dtype_named(const std::string& name);
Names read_copy_names();

// One of `names`, handed to `use`.
void add_choice(CLI::App& app, const std::string& flag, const Names& names,
                const char* shown_default, const std::string& help,
                const std::function<void(const std::string&)>& use);

template <class T>
CLI::Option* add_number(CLI::App& app, const std::string& flag, T& value, int64_t least,
                        int64_t most, const std::string& help) {
  return app.add_option(flag, value, help)
      ->check(CLI::Range(least, most))
      ->type_name("N")
      ->capture_default_str();
}

void add_seed(CLI::App& app, uint64_t& seed, const std::string& help);
void add_switch(CLI::App& app, const std::string& flag, bool& value, const std::string& help);

// Every occurrence of the flag adds its argument as it stands.
CLI::Option* add_texts(CLI::App& app, const std::string& flag, Names& values,
                       const std::string& help);

// "1,2,3" and, with `ranges`, "0-2,7".
std::vector<int64_t> parse_list(const std::string& flag, std::string_view text, bool ranges);
// "1,8,64", each from 1 to kMostSequences.
std::vector<int64_t> parse_batch_sizes(const std::string& flag, const std::string& text);
std::vector<int32_t> to_ids(const std::vector<int64_t>& values);

// What every command that computes takes. The choice of an instruction set is the process's and
// must be made before anything computes: it applies as it is parsed.
void add_cpu(CLI::App& app, int& threads);
void add_model(CLI::App& app, ModelOptions& options);
void add_state_dtype(CLI::App& app, StateOptions& options);
void add_read_dtype(CLI::App& app, StateOptions& options);
void add_state(CLI::App& app, StateOptions& options);
void add_route(CLI::App& app, RouteOptions& options);
void add_speculation(CLI::App& app, SpeculationOptions& options);
void add_max_num_seqs(CLI::App& app, LimitOptions& options);
void add_max_num_batched_tokens(CLI::App& app, LimitOptions& options);
void add_gpu_memory_utilization(CLI::App& app, LimitOptions& options);
// All but the model.
void add_decoding(CLI::App& app, DecodingOptions& options);

}  // namespace replayssm::cli
