// replayssm bench accuracy: how well a model predicts a text, on every way through it.
#pragma once

#include <cstdint>
#include <string>

#include "cli/options.h"

namespace replayssm::cli {

struct AccuracyOptions {
  ModelOptions model;
  StateOptions state;
  LimitOptions limits;
  std::string text;           // a file, or "-"
  std::string route = "all";  // all | prefill | a route's name
  int64_t window = 2048;      // tokens that are scored together, each window alone
  int64_t max_tokens = 8192;  // of the text; 0 = all
  bool json = false;
};

void bench_accuracy(const AccuracyOptions& options);

}  // namespace replayssm::cli
