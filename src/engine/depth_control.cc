#include "engine/depth_control.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>

#include "engine/scheduler.h"

namespace replayssm {
namespace {

constexpr int64_t kPlainEvery = 256;  // passes after which plain ones are measured anew

}  // namespace

// Few counts stay apart, many fall together.
int64_t CostCurve::bucket(int64_t count) {
  int64_t unit = 1;
  constexpr int64_t kApart = 256;
  while (count / unit > kApart) unit *= 2;
  return count / unit * unit;
}

void CostCurve::add(int64_t count, double seconds) {
  ++time_;
  const auto [at, fresh] = points_.try_emplace(bucket(count), Point{seconds, time_});
  if (fresh) return;
  // One slow pass is not a trend; one that is as slow again and again gets through.
  constexpr double kWeight = 0.2, kOutlier = 2;
  Point& point = at->second;
  point.seconds += kWeight * (std::min(seconds, kOutlier * point.seconds) - point.seconds);
  point.time = time_;
}

double CostCurve::at(int64_t count) const {
  if (points_.empty()) return 0;
  const auto key = bucket(count);
  const auto behind = points_.lower_bound(key);
  if (behind != points_.end() && (behind->first == key || behind == points_.begin()))
    return behind->second.seconds;
  auto right = behind == points_.end() ? std::prev(behind) : behind;
  if (right == points_.begin()) return right->second.seconds;
  const auto left = std::prev(right);
  const double slope = (right->second.seconds - left->second.seconds) /
                       static_cast<double>(right->first - left->first);
  return left->second.seconds + std::max(slope, 0.0) * static_cast<double>(key - left->first);
}

int64_t CostCurve::age(int64_t count) const {
  const auto at = points_.find(bucket(count));
  return at == points_.end() ? std::numeric_limits<int64_t>::max() : time_ - at->second.time;
}

DepthControl::Costs& DepthControl::costs_of(int64_t sequences) {
  constexpr double kStep = 1.25;
  return costs_[std::lround(std::log(static_cast<double>(sequences)) / std::log(kStep))];
}

void DepthControl::time_pass(int64_t sequences, int64_t rows, double seconds) {
  costs_of(sequences).pass.add(rows, seconds);
}

void DepthControl::time_draft(int64_t sequences, int64_t drafted, double seconds) {
  costs_of(sequences).draft.add(drafted, seconds);
}

void DepthControl::choose(std::span<DraftRequest> requests) {
  std::vector<int64_t> most;
  int64_t drafting = 0;
  for (DraftRequest& request : requests) {
    most.push_back(request.depth);
    drafting += request.depth > 0;
  }
  if (!adaptive_ || drafting == 0) return;
  ++passes_;
  const auto sequences = static_cast<int64_t>(requests.size());
  const Costs& costs = costs_of(sequences);
  for (DraftRequest& request : requests) request.depth = 0;
  const bool measure = costs.pass.age(sequences) > kPlainEvery;
  if (!measure) {
    // The likeliest tokens first: each is a prefix of what pays.
    std::priority_queue<std::pair<double, int64_t>> gains;
    for (int64_t i = 0; i < sequences; ++i) {
      if (most[i] > 0) gains.emplace(requests[i].sequence->acceptance.rate, -i);
    }
    double tokens = static_cast<double>(sequences), best = 0;
    int64_t drafted = 0, best_drafted = 0;
    std::vector<int64_t> order;
    constexpr double kCertain = 1.01;  // what measurements are not sure of is no gain
    best = kCertain * tokens / (costs.pass.at(sequences) + costs.draft.at(0));
    while (!gains.empty() && sequences + drafted < most_rows_) {
      const auto [gain, index] = gains.top();
      gains.pop();
      const int64_t i = -index;
      tokens += gain;
      order.push_back(i);
      ++drafted;
      const int64_t depth = ++requests[i].depth;
      if (depth < most[i]) gains.emplace(gain * requests[i].sequence->acceptance.rate, index);
      const double rate = tokens / (costs.pass.at(sequences + drafted) + costs.draft.at(drafted));
      if (rate <= best) continue;
      best = rate;
      best_drafted = drafted;
    }
    for (size_t i = best_drafted; i < order.size(); ++i) --requests[order[i]].depth;
  }
  if (std::ranges::all_of(requests, [](const auto& request) { return request.depth == 0; }))
    probe(requests, costs);
  for (int64_t i = 0; i < sequences; ++i) requests[i].depth = std::min(requests[i].depth, most[i]);
}

// So seldom that it costs no more than a hundredth.
void DepthControl::probe(std::span<DraftRequest> requests, const Costs& costs) {
  constexpr int64_t kMostOften = 8, kShare = 100;
  const auto sequences = std::ssize(requests);
  const double plain = costs.pass.at(sequences), more = costs.pass.at(sequences + 1);
  const auto wait = plain > 0 ? static_cast<int64_t>(kShare * (more / plain - 1)) : kMostOften;
  if (passes_ % std::max(wait, kMostOften) == 0) requests[trying(sequences)].depth = 1;
}

}  // namespace replayssm
