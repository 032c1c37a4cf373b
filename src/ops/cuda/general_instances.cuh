// The step kernel for any shape, and how it is launched.
#pragma once

#include "ops/cuda/general_instances.h"
#include "ops/cuda/token_rows_launch.cuh"
#include "ops/cuda/token_step.cuh"

namespace replayssm::cuda {

template <Family kFamily, class State, int kState, bool kWhole>
__global__ void __launch_bounds__(32 * kTokenWarps, 3)
    general_step_kernel(const __grid_constant__ RecurrentStepParams p,
                        const __grid_constant__ TokenLaunch launch) {
  extern __shared__ __align__(256) char memory[];
  release_successor();
  wait_for_predecessor();
  TokenStep<kFamily, State, kState, kWhole>(p, launch, reinterpret_cast<float*>(memory)).run();
}

template <Family kFamily>
void launch_general_step(const RecurrentStepParams& p, const TokenLaunch& launch, bool aligned,
                         cudaStream_t stream) {
  dispatch_token_rows(p, aligned, [&]<class State, int kState, bool kWhole>() {
    launch_token_rows<TokenStep<kFamily, State, kState, kWhole>>(
        "recurrent_step", general_step_kernel<kFamily, State, kState, kWhole>, p,
        p.batch.ring.buffer_len + p.batch.ring.max_window, stream, launch);
  });
}

}  // namespace replayssm::cuda
