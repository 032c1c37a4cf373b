// Weights that are made up, on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "replayssm/types.h"

namespace replayssm::cuda {

// Those of core/random_weight.h from position `first` on, as float32, float16 or bfloat16.
void write_random_weights(void* to, DType dtype, uint64_t first, int64_t count,
                          cudaStream_t stream);

}  // namespace replayssm::cuda
