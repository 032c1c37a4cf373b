// How calls are cut into blocks: pure functions of shape and device.
#pragma once

#include <string>

#include "ops/cuda/step_layout.h"

namespace replayssm::cuda {

// What the choice depends on.
struct Device {
  int multiprocessors = 0;
  int shared_bytes_per_block = 0;  // most that a block may ask for
};

// The current CUDA device.
Device current_device();

// What a step is, as far as the choice is concerned.
struct StepDescription {
  RecurrentShape shape;
  RingConfig ring;
  StepTypes types;
  int64_t sequences = 0;
  bool replays = true;   // not the conventional route
  bool has_room = true;  // while the kernel before it runs: that is no matrix product
};

StepDescription describe(const RecurrentStepParams& params);

// Whether the step kernel can be cut so.
bool cuts(const RecurrentShape& shape, const LaunchConfig& config);

// What was measured to be best (launch_table.inc), else what the rule says.
LaunchConfig choose_launch(const StepDescription& step, const Device& device);
LaunchConfig launch_by_rule(const StepDescription& step, const Device& device);

// "heads=2 slices=1 warps=4 preparing=0 ahead=0 fold_blocks=1".
std::string to_string(const LaunchConfig& config);

}  // namespace replayssm::cuda
