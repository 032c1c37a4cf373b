// The step kernel's instantiations, split over files by family and activation type.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/step_launch.h"
#include "replayssm/ops.h"

namespace replayssm::cuda {

template <Family kFamily, DType kActivation>
void launch_step(const RecurrentStepParams& params, const StepLaunch& launch, int64_t blocks,
                 cudaStream_t stream);

}  // namespace replayssm::cuda
