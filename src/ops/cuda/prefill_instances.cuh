// The kernel that takes prompts token by token, and how it is launched.
#pragma once

#include "ops/cuda/prefill_instances.h"
#include "ops/cuda/token_rows_launch.cuh"

namespace replayssm::cuda {

template <Family kFamily, class State, int kState, bool kWhole>
__global__ void __launch_bounds__(32 * kTokenWarps, 4)
    recurrent_prefill_kernel(const __grid_constant__ RecurrentPrefillParams p,
                             const __grid_constant__ TokenLaunch launch) {
  extern __shared__ __align__(16) float memory[];
  release_successor();
  TokenRows<kFamily, State, kState, kWhole>(p, launch, memory).run_prompt();
}

template <Family kFamily>
void launch_prefill(const RecurrentPrefillParams& p, bool aligned, cudaStream_t stream) {
  dispatch_token_rows(p, aligned, [&]<class State, int kState, bool kWhole>() {
    launch_token_rows<TokenRows<kFamily, State, kState, kWhole>>(
        "recurrent_prefill", recurrent_prefill_kernel<kFamily, State, kState, kWhole>, p, INT32_MAX,
        stream);
  });
}

}  // namespace replayssm::cuda
