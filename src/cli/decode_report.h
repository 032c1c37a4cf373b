// What `bench decode` has measured, and how it is shown.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/bandwidth.h"
#include "model/model.h"
#include "replay/bytes.h"

namespace replayssm::cli {

// Medians over the blocks of one route, per step.
struct RouteResult {
  Route route = Route::kConventional;
  double ms_per_step = 0;
  StageTimes stages;     // milliseconds
  StateTraffic traffic;  // computed: of all rows and layers
};

// Stages by the names that reports give them.
std::array<std::pair<const char*, double>, 8> stage_list(const StageTimes& times);

struct DecodeReport {
  std::string model{};
  DType dtype = DType::kFloat32;
  DType state_dtype = DType::kFloat32;
  std::optional<DType> read_dtype;  // of the read copies that the replay routes keep
  int threads = 0;
  int32_t buffer_len = 0;
  int64_t batch_size = 0, prompt_len = 0, warmup_steps = 0, num_steps = 0, repeats = 0;
  int64_t block_steps = 0;       // a whole number of flush cycles
  int64_t checkpoint_bytes = 0;  // of one route: what conventional reads and writes each step
  int64_t read_copy_bytes = 0;   // of one replay route
  int64_t probe_bytes = 0;       // what the bandwidths were measured on
  Bandwidth bandwidth;
  std::vector<RouteResult> results{};  // conventional first
};

std::string table(const DecodeReport& report);
std::string json(const DecodeReport& report);

// Several batch sizes: a row each, all reports as a list, or a figure (SVG).
std::string sweep_table(const std::vector<DecodeReport>& reports);
std::string sweep_json(const std::vector<DecodeReport>& reports);
std::string sweep_plot(const std::vector<DecodeReport>& reports);

}  // namespace replayssm::cli
