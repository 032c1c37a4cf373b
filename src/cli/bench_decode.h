// replayssm bench decode: conventional against both replay routes, in one run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "cli/options.h"

namespace replayssm::cli {

struct DecodeOptions {
  ModelOptions model;
  StateOptions state;
  LimitOptions limits;
  uint64_t seed = 0;  // of the prompts
  int64_t batch_size = 1;
  std::vector<int64_t> sweep;  // batch sizes to run one after another, in place of batch_size
  int64_t num_steps = 128;     // measured, per route and repeat
  int64_t warmup_steps = 16;
  int64_t repeats = 3;
  int64_t prompt_len = 32;
  bool json = false;
  std::filesystem::path plot{};  // where the sweep's figure goes; empty: nowhere
};

void bench_decode(const DecodeOptions& options);

}  // namespace replayssm::cli
