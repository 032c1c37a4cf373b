// Decode steps and folds of the shapes and types that the step kernel has no path for.
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/ops.h"

namespace replayssm::cuda {

// folds_all: no window, the whole ring goes into the checkpoint of target_slot; null: in place.
void general_step(const RecurrentStepParams& params, bool folds_all, const int32_t* target_slot,
                  cudaStream_t stream);

}  // namespace replayssm::cuda
