// The prefill kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/ops.h"

namespace replayssm::cuda {

// Token by token. Dispatches over checkpoint type and state_dim. `aligned`: rows start at multiples
// of 16 bytes.
template <Family kFamily>
void launch_prefill(const RecurrentPrefillParams& params, bool aligned, cudaStream_t stream);

// In chunks of matrix products. False: there is no kernel for this head_dim.
template <Family kFamily>
bool launch_prefill_chunks(const RecurrentPrefillParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
