// The causal convolution on CUDA devices (contract: ConvParams in replayssm/ops.h, with device
// pointers).
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/ops.h"

namespace replayssm::cuda {

// `longest_window` says how long windows may get, for cutting long ones into pieces that run side
// by side; 0: max_window. Longer ones are served too, one piece behind another, so that a captured
// call stays valid whatever the windows become. Windows of trees have at most max_window tokens.
//
// A call overlaps the kernel before it in the stream: kernels since the last begin or commit must
// not write slots, query starts, cursors, kept inputs, weight or bias.
void causal_conv(const ConvParams& params, int64_t longest_window, cudaStream_t stream);

}  // namespace replayssm::cuda
