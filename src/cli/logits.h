// replayssm logits: raw logits, to compare with other implementations.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/options.h"

namespace replayssm::cli {

struct LogitsOptions {
  ModelOptions model;
  StateOptions state;
  LimitOptions limits;
  std::vector<int32_t> ids;
  std::vector<int64_t> positions;  // empty = the last
  bool json = false;
};

void logits(const LogitsOptions& options);

}  // namespace replayssm::cli
