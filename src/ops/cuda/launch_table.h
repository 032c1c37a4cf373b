// Launches of the step kernel that were measured to be faster than what the rule chooses.
#pragma once

#include <span>

#include "ops/cuda/launch.h"

namespace replayssm::cuda {

struct TunedLaunch {
  int multiprocessors;
  RecurrentShape shape;
  StepTypes types;
  int32_t max_window;
  int64_t sequences;
  LaunchConfig config;
};

// launch_table.inc, which `op_cuda --tune` writes.
std::span<const TunedLaunch> launch_table();

// The one measured for this device, shape, types and window with the nearest number of sequences,
// at most 1.5 times more or fewer; null: there is none.
const TunedLaunch* find_tuned(std::span<const TunedLaunch> table, const StepDescription& step,
                              const Device& device);

}  // namespace replayssm::cuda
