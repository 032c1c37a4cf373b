#include "engine/stop.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace replayssm {
namespace {

// Length of the longest suffix of `text` that begins `stop` without being all of it.
size_t partial_match(std::string_view text, std::string_view stop) {
  size_t length = std::min(text.size(), stop.size() - 1);
  while (!text.ends_with(stop.substr(0, length))) --length;
  return length;
}

}  // namespace

StopMatcher::StopMatcher(std::vector<std::string> stop) : stop_(std::move(stop)) {
  for (const std::string& text : stop_) REPLAYSSM_CHECK(!text.empty(), "empty stop string");
}

std::string StopMatcher::push(std::string_view text) {
  if (matched_) return {};
  held_ += text;
  size_t begin = std::string::npos;
  size_t end = std::string::npos;
  size_t hold = 0;
  for (const std::string& stop : stop_) {
    hold = std::max(hold, partial_match(held_, stop));
    const size_t at = held_.find(stop);
    if (at == std::string::npos) continue;
    const size_t behind = at + stop.size();
    if (behind < end || (behind == end && at < begin)) {
      begin = at;
      end = behind;
    }
  }
  matched_ = end != std::string::npos;
  std::string certain = held_.substr(0, matched_ ? begin : held_.size() - hold);
  held_.erase(0, matched_ ? held_.size() : certain.size());
  return certain;
}

std::string StopMatcher::finish() { return std::exchange(held_, {}); }

}  // namespace replayssm
