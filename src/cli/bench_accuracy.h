// replayssm bench accuracy: how well a model predicts a text, on every way through it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

  bool precision_sweep = false;
  std::vector<std::string> read_formats = {"float32", "float16", "bfloat16",
                                           "e4m3",    "int8",    "int4/32"};
  std::vector<std::string> recurrence_formats = {"float32", "float16", "bfloat16", "bfloat16-sr",
                                                 "int8",    "e4m3",    "e4m3-sr"};
  std::vector<int32_t> buffer_lens = {4, 16, 64};
};

void bench_accuracy(const AccuracyOptions& options);

}  // namespace replayssm::cli
