#include "cli/progress.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace replayssm::cli {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(100);
constexpr int64_t kWidth = 30;

}  // namespace

Progress::Progress(std::string label)
    : label_(std::move(label)), terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (drawn_) std::fputs("\r\x1b[K", stderr);
}

void Progress::update(int64_t done, int64_t total) {
  const auto now = std::chrono::steady_clock::now();
  if (!terminal_ || total <= 0 || now < next_) return;
  next_ = now + kInterval;
  drawn_ = true;
  const int64_t filled = std::clamp<int64_t>(kWidth * done / total, 0, kWidth);
  fmt::print(stderr, "\r{} [{:<{}}] {}/{}\x1b[K", label_, std::string(filled, '='), kWidth, done,
             total);
  std::fflush(stderr);
}

}  // namespace replayssm::cli
