// Decode steps over caches of another engine on CUDA devices (contracts: replayssm/paged.h).
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/launch.h"
#include "ops/paged.h"

namespace replayssm::cuda {

void paged_step(const PagedStep& step, const Device& device, cudaStream_t stream);
void paged_commit(const PagedCursors& cursors, const PagedIntegers& accepted, cudaStream_t stream);
void paged_reset(const PagedCursors& cursors, const PagedIntegers& first, cudaStream_t stream);

}  // namespace replayssm::cuda
