// The step kernel's instantiations, split over files by family, types and windows.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/step_launch.h"
#include "replayssm/ops.h"

namespace replayssm::cuda {

// kMany: windows may have more than one token.
template <Family kFamily, DType kActivation, DType kCheckpoint, bool kMany>
void launch_step(const RecurrentStepParams& params, const StepLaunch& launch, StepPart part,
                 dim3 grid, cudaStream_t stream);

}  // namespace replayssm::cuda
