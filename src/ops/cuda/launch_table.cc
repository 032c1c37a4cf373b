#include "ops/cuda/launch_table.h"

#include <algorithm>
#include <initializer_list>

namespace replayssm::cuda {
namespace {

constexpr std::initializer_list<TunedLaunch> kTable = {
#include "ops/cuda/launch_table.inc"
};

bool is_same(const RecurrentShape& x, const RecurrentShape& y) {
  return x.family == y.family && x.heads == y.heads && x.key_heads == y.key_heads &&
         x.head_dim == y.head_dim && x.state_dim == y.state_dim;
}
bool is_same(const StepTypes& x, const StepTypes& y) {
  return x.activation == y.activation && x.checkpoint == y.checkpoint && x.read == y.read;
}

}  // namespace

std::span<const TunedLaunch> launch_table() { return {kTable.begin(), kTable.size()}; }

const TunedLaunch* find_tuned(std::span<const TunedLaunch> table, const StepDescription& step,
                              const Device& device) {
  const TunedLaunch* best = nullptr;
  double best_ratio = 1.5;
  for (const TunedLaunch& each : table) {
    if (each.multiprocessors != device.multiprocessors || !is_same(each.shape, step.shape) ||
        !is_same(each.types, step.types) || each.max_window != step.ring.max_window)
      continue;
    const auto [fewer, more] = std::minmax(each.sequences, step.sequences);
    if (fewer < 1) continue;
    const double ratio = double(more) / double(fewer);
    if (ratio > best_ratio || (best && ratio == best_ratio)) continue;
    best = &each;
    best_ratio = ratio;
  }
  return best;
}

}  // namespace replayssm::cuda
