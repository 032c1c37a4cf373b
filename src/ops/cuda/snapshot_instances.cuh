// The snapshot kernel, and how it is launched.
#pragma once

#include "ops/cuda/snapshot_instances.h"
#include "ops/cuda/token_rows_launch.cuh"

namespace replayssm::cuda {

template <Family kFamily, class State, int kState, bool kWhole>
__global__ void __launch_bounds__(32 * kTokenWarps, kState <= 128 ? 5 : 4)
    snapshot_step_kernel(const __grid_constant__ SnapshotStepParams p,
                         const __grid_constant__ TokenLaunch launch) {
  extern __shared__ __align__(16) float snapshot_shared[];
  release_successor();
  TokenRows<kFamily, State, kState, kWhole>(p, launch, snapshot_shared).run_snapshots(p);
}

template <Family kFamily>
void launch_snapshot(const SnapshotStepParams& p, bool aligned, cudaStream_t stream) {
  dispatch_token_rows(p, aligned, [&]<class State, int kState, bool kWhole>() {
    launch_token_rows<TokenRows<kFamily, State, kState, kWhole>>(
        "snapshot_step", snapshot_step_kernel<kFamily, State, kState, kWhole>, p,
        p.batch.ring.max_window, stream);
  });
}

}  // namespace replayssm::cuda
