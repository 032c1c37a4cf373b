// CUDA's status codes as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>

#include "core/check.h"

namespace replayssm::cuda {

// Throws unless `status` is success; `what` names the operation.
inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) [[unlikely]]
    fail(what, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status));
}

}  // namespace replayssm::cuda
