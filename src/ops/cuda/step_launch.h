// One launch of the step kernel.
#pragma once

#include "ops/cuda/step_layout.h"

namespace replayssm::cuda {

struct StepLaunch {
  LaunchConfig config;
  StepLayout layout;
  FastDivide slices, group, ring_rows;   // by slices, by heads of a key head, by ring rows
  bool fold_all = false;                 // no window: the whole ring goes into the checkpoint
  const int32_t* target_slot = nullptr;  // of fold_all; null: in place
};

}  // namespace replayssm::cuda
