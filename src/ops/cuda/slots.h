// Ops on all that a layer keeps of a slot, on CUDA devices (contracts: replayssm/ops.h, with device
// pointers). Everything is decided from device data: captured calls stay valid.
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/ops.h"

namespace replayssm::cuda {

void slot_clear(const SlotClearParams& params, cudaStream_t stream);
void slot_copy(const SlotCopyParams& params, cudaStream_t stream);
void compact(const CompactParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
