// What steps of single tokens need no states for, in a launch of its own before the step kernel:
// targets, and what ring and window rows add to the outputs. For sequences that do not fold, which
// have at most kMostPreparedRows rows.
//
// A block takes the heads that a block of the step kernel takes, and appends their window. It waits
// for its rows and for little else, and many share a multiprocessor: in the step kernel the words
// of states that are on their way would wait as long.
#pragma once

#include "ops/cuda/step_prepare_kimi.cuh"
#include "ops/cuda/step_prepare_mamba2.cuh"

namespace replayssm::cuda {

template <Family kFamily, class Source, int kState>
using Preparation =
    std::conditional_t<kFamily == Family::kMamba2, Mamba2Preparation<Source, kState>,
                       KimiPreparation<Source, kState>>;

template <Family kFamily, class Source, int kState>
__global__ void __launch_bounds__(32 * kMaxWarps, 8)
    prepare_kernel(const __grid_constant__ RecurrentStepParams p,
                   const __grid_constant__ StepLaunch launch) {
  using Block = Preparation<kFamily, Source, kState>;
  extern __shared__ __align__(256) char memory[];
  release_successor();
  const BlockPlace b = block_place(p, launch);
  if (b.slot < 0 || b.window <= 0 || !is_prepared(launch, b)) return wait_for_predecessor();
  const typename Block::Shared handed(launch.layout, nullptr, handed_block(launch));
  Block(p, launch, b, handed, memory).run();
}

}  // namespace replayssm::cuda
