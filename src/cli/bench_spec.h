// replayssm bench spec: decoding with and without drafts, verified by snapshots or by the ring.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cli/options.h"
#include "model/model.h"

namespace replayssm::cli {

struct SpecOptions {
  ModelOptions model;
  StateOptions state;
  LimitOptions limits{.max_model_len = 2048};
  SpeculativeConfig speculative;
  SamplingParams sampling;
  std::vector<int64_t> batch_sizes = {1};
  int64_t num_steps = 64, warmup_steps = 16, repeats = 3;
  int64_t prompt_len = 128;
  std::string text;                // whose pieces are the prompts; empty: random tokens
  std::vector<std::string> modes;  // empty: all
  bool json = false;
  std::filesystem::path plot{};  // where a figure goes; empty: nowhere
};

void bench_spec(const SpecOptions& options);

// What one way of decoding did at one batch size.
struct SpecResult {
  std::string mode;
  double tokens_per_second = 0;
  double length = 1;                                  // tokens of a sequence and step
  std::vector<double> accepted{};                     // by position
  double verify_ms = 0, draft_ms = 0, commit_ms = 0;  // of a step
  double step_ms = 0;
  StageTimes stages{};        // of a step, in seconds, drafting included
  int64_t request_bytes = 0;  // of a request of max_model_len tokens: states and caches
  int64_t most_requests = 0;  // that fit
};

struct SpecReport {
  std::string model{}, method{};
  int64_t batch_size = 0, tokens = 0;
  double simulated_length = 0;
  int64_t memory = 0;  // for requests
  int64_t max_model_len = 0;
  std::vector<SpecResult> results{};
};

std::string table(const SpecReport& report);
std::string json(const std::vector<SpecReport>& reports);
std::string plot(const std::vector<SpecReport>& reports);  // over batch sizes, as SVG

}  // namespace replayssm::cli
