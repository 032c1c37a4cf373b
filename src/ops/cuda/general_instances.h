// The step kernel for any shape, split over files by family.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/token_rows.h"

namespace replayssm::cuda {

// launch: what only steps have. aligned: rows start at multiples of 16 bytes.
template <Family kFamily>
void launch_general_step(const RecurrentStepParams& params, const TokenLaunch& launch, bool aligned,
                         cudaStream_t stream);

}  // namespace replayssm::cuda
