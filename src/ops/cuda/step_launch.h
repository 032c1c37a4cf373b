// One launch of the step kernel.
#pragma once

#include "ops/cuda/step_layout.h"

namespace replayssm::cuda {

struct StepLaunch {
  LaunchConfig config;
  StepLayout layout;
  int heads = 0, key_heads = 0, head_dim = 0;
  int slice_rows = 0;                    // of a head, in one block
  int head_passes = 0;                   // that those are
  FastDivide group, ring_rows;           // by heads of a key head, ring rows
  FastDivide passes;                     // by head_passes
  bool fold_all = false;                 // no window: the whole ring goes into the checkpoint
  const int32_t* target_slot = nullptr;  // of fold_all; null: in place
};

}  // namespace replayssm::cuda
