// A progress bar on standard error; silent where that is not a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace replayssm::cli {

class Progress {
 public:
  explicit Progress(std::string label);
  ~Progress();  // clears the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(int64_t done, int64_t total);

 private:
  std::string label_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point next_{};
};

}  // namespace replayssm::cli
