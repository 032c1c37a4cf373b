// The paged decode kernels, split over files by family and activation type.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/launch.h"
#include "ops/paged.h"

namespace replayssm::cuda {

// Launches the kernel for these element types and shapes, if there is one.
template <replayssm_family kFamily, replayssm_dtype kActivation>
bool launch_paged(const PagedStep& step, const Device& device, cudaStream_t stream);

// For everything else.
void launch_paged_any(const PagedStep& step, cudaStream_t stream);

}  // namespace replayssm::cuda
