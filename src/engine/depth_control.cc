#include "engine/depth_control.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <queue>
#include <utility>

#include "engine/scheduler.h"

namespace replayssm {
namespace {

constexpr int64_t kPlainEvery = 256;  // passes after which plain ones are measured anew
constexpr int64_t kFirst = 3;         // measurements of a count until it is known
constexpr double kUnknown = 0.6;      // acceptance where there were no drafts

}  // namespace

// 0, 1, 2, 3, 4, 6, 8, 12, 16, ...: the largest of these that is not above the count.
int64_t CostCurve::bucket(int64_t count) {
  if (count < 2) return count;
  const auto power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(count)));
  const int64_t middle = power + power / 2;
  return count < middle ? power : middle;
}

void CostCurve::add(int64_t count, double seconds) {
  ++time_;
  Point& point = points_[bucket(count)];
  if (point.measured == 0) point = {.count = static_cast<double>(count), .seconds = seconds};
  const bool sure = point.measured >= kFirst && !is_old(point);
  ++point.measured;
  point.time = time_;
  constexpr double kWeight = 0.2, kOutlier = 2;
  point.count += kWeight * (static_cast<double>(count) - point.count);
  if (!sure) {
    point.seconds = std::min(point.seconds, seconds);
    return;
  }
  // One slow pass is not a trend; one that is as slow again and again gets through.
  point.seconds += kWeight * (std::min(seconds, kOutlier * point.seconds) - point.seconds);
}

bool CostCurve::is_old(const Point& point) const {
  constexpr int64_t kOfOne = 64, kMost = 2048;
  return time_ - point.time > std::min(kOfOne * point.measured, kMost);
}

double CostCurve::at(int64_t count) const {
  const Point *before = nullptr, *last = nullptr;
  const auto x = static_cast<double>(count);
  for (const auto& [bucket, point] : points_) {
    if (point.measured < kFirst || is_old(point)) continue;
    before = std::exchange(last, &point);
    if (point.count >= x) break;
  }
  if (!last) return 0;
  if (!before) return last->seconds;
  const double slope = (last->seconds - before->seconds) / (last->count - before->count);
  if (x <= last->count) return before->seconds + slope * (x - before->count);
  return last->seconds + std::max(slope, 0.0) * (x - last->count);
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
  costs_of(sequences).pass.add(rows - sequences, seconds);
}

void DepthControl::time_draft(int64_t sequences, int64_t drafted, double seconds) {
  costs_of(sequences).draft.add(drafted, seconds);
}

void DepthControl::choose(std::span<DraftRequest> requests) {
  const bool wanted =
      std::ranges::any_of(requests, [](const DraftRequest& request) { return request.depth > 0; });
  if (!adaptive_ || !wanted) return;
  ++passes_;
  const Costs& costs = costs_of(std::ssize(requests));
  const bool plain = costs.pass.at(0) == 0 || costs.pass.age(0) > kPlainEvery;
  std::vector<int64_t> depths(requests.size(), 0);
  if (!plain) depths = best(requests, costs);
  const bool none = std::ranges::count(depths, 0) == std::ssize(depths);
  if (const int64_t one = trying(std::ssize(requests)); none && one >= 0 && tries(costs))
    depths[one] = 1;
  for (size_t i = 0; i < requests.size(); ++i)
    requests[i].depth = std::min(requests[i].depth, depths[i]);
}

// The depths that promise the most tokens per second.
std::vector<int64_t> DepthControl::best(std::span<const DraftRequest> requests,
                                        const Costs& costs) const {
  const auto sequences = std::ssize(requests);
  const double typical = all_.rate(kUnknown);
  // The likeliest tokens first: each is a prefix of what pays.
  std::priority_queue<std::pair<double, int64_t>> gains;
  std::vector<double> rates;
  for (int64_t i = 0; i < sequences; ++i) {
    rates.push_back(requests[i].sequence->acceptance.rate(typical));
    if (requests[i].depth > 0) gains.emplace(rates[i], -i);
  }
  std::vector<int64_t> depths(requests.size(), 0), order;
  auto tokens = static_cast<double>(sequences);
  constexpr double kCertain = 1.01;  // what measurements are not sure of is no gain
  double most = kCertain * tokens / (costs.pass.at(0) + costs.draft.at(0));
  size_t paying = 0;
  constexpr double kLeast = 0.1;  // less likely tokens are not worth finding out what they cost
  while (!gains.empty() && sequences + std::ssize(order) < most_rows_) {
    const auto [gain, index] = gains.top();
    gains.pop();
    if (gain < kLeast) break;
    tokens += gain;
    order.push_back(-index);
    const int64_t depth = ++depths[-index];
    if (depth < requests[-index].depth) gains.emplace(gain * rates[-index], index);
    const auto drafted = std::ssize(order);
    const double rate = tokens / (costs.pass.at(drafted) + costs.draft.at(drafted));
    if (rate <= most) continue;
    most = rate;
    paying = order.size();
  }
  for (size_t i = paying; i < order.size(); ++i) --depths[order[i]];
  return depths;
}

// So seldom that it costs no more than a hundredth.
bool DepthControl::tries(const Costs& costs) const {
  constexpr int64_t kMostOften = 8, kShare = 100;
  const double plain = costs.pass.at(0), more = costs.pass.at(1);
  const auto wait = plain > 0 ? static_cast<int64_t>(kShare * (more / plain - 1)) : kMostOften;
  return passes_ % std::max(wait, kMostOften) == 0;
}

}  // namespace replayssm
