// What `bench op` has measured, and how it is shown.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/op_run.h"
#include "core/bandwidth.h"

namespace replayssm::cli {

// Per call of the op.
struct OpResult {
  std::string name;
  int64_t tokens = 0;    // of all sequences
  double seconds = 0;    // median
  StateTraffic traffic;  // computed
};

struct OpReport {
  std::string op{};
  OpSetup setup;
  int64_t window = 0, accepted = 0;
  int threads = 0;
  int64_t repeats = 0;
  int64_t state_bytes = 0;  // of all slots
  int64_t probe_bytes = 0;  // what the bandwidths were measured on
  Bandwidth bandwidth;
  std::vector<OpResult> results{};  // the baseline first
};

std::string table(const OpReport& report);
std::string json(const OpReport& report);

}  // namespace replayssm::cli
