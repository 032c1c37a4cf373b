// The snapshot kernel's instantiations, split over files by family.
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/ops.h"

namespace replayssm::cuda {

// Dispatches over checkpoint type and state_dim. `aligned`: rows start at multiples of 16 bytes.
template <Family kFamily>
void launch_snapshot(const SnapshotStepParams& params, bool aligned, cudaStream_t stream);

}  // namespace replayssm::cuda
