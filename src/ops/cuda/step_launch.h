// One launch of the step kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/launch.h"

namespace replayssm::cuda {

struct StepLaunch {
  LaunchConfig config;
  StepLayout layout;
  int heads = 0, key_heads = 0, head_dim = 0;
  int slice_rows = 0;                    // of a head, in one block
  int head_passes = 0;                   // that those are
  FastDivide group, ring_rows;           // by heads of a key head, ring rows
  FastDivide passes;                     // by head_passes
  bool early = false;                    // all blocks run at once, and prepare what they can before
                                         // they wait for the kernel before
  bool ahead = false;                    // LaunchConfig::ahead, where the step can be taken so
  bool fold_all = false;                 // no window: the whole ring goes into the checkpoint
  const int32_t* target_slot = nullptr;  // of fold_all; null: in place

  // [blocks] handed_bytes that the launch before hands over; null: blocks prepare themselves.
  char* handed = nullptr;

  // Of a fused step (ops.h: LayerStepParams). conv.x null: v, k, q, b and g are given.
  DType projected = DType::kFloat32;
  LayerConv conv;
  ScalarGates gates;
  FastDivide conv_rows;  // by the rows of a slot's inputs
  int conv_units = 0;    // of kConvUnit channels that a block convolves
};

// The launches of a step.
enum class StepPart { kPreparation, kStep };

// Checks and launches. workspace: as recurrent_step takes it. `launch` comes with what does
// not follow from the others.
void run_step(const RecurrentStepParams& params, void* workspace, const LaunchConfig& config,
              StepLaunch launch, cudaStream_t stream);

}  // namespace replayssm::cuda
