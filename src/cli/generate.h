// replayssm generate: text from a model.
#pragma once

#include <string>
#include <vector>

#include "cli/options.h"

namespace replayssm::cli {

struct GenerateOptions : DecodingOptions {
  SamplingParams sampling;
  std::vector<std::string> prompts;  // none: prompt_file
  std::string prompt_file = "-";     // "-" = standard input
  bool chat = false;
  std::string system;
  int64_t max_tokens = 128;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_ids;
  bool ignore_eos = false;
};

void generate(const GenerateOptions& options);

}  // namespace replayssm::cli
