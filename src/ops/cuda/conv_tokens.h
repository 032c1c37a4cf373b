// The convolution of steps of one token a sequence.
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/ops.h"

namespace replayssm::cuda {

// causal_conv where windows most likely have one token; longer ones are served, slowly. Returns
// whether it takes such sizes and addresses; the arguments have been checked.
bool conv_tokens(const ConvParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
