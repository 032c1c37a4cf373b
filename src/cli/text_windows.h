// A text cut into windows of tokens that are scored each on its own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "cli/bench_accuracy.h"
#include "model/config.h"

namespace replayssm::cli {

struct TextWindows {
  std::vector<int32_t> ids;
  std::vector<std::span<const int32_t>>
      windows;  // of ids; at least two tokens, the last may be short

  int64_t scored_tokens() const;
};

// Throws Error where the text or the window does not suit the model.
TextWindows read_windows(const AccuracyOptions& options, const std::filesystem::path& folder,
                         const ModelConfig& config);

}  // namespace replayssm::cli
