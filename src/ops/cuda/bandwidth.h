// The memory bandwidth of the current CUDA device: the yardstick of the benchmarks.
#pragma once

#include "core/bandwidth.h"

namespace replayssm::cuda {

// Medians of streams over `bytes` of memory, which are taken for the call.
Bandwidth measure_bandwidth(int64_t bytes);

}  // namespace replayssm::cuda
