// Picks an instantiation of the paged tile kernel and launches it.
#pragma once

#include "core/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/paged_instances.h"
#include "ops/cuda/paged_step.cuh"

namespace replayssm::cuda {

template <replayssm_family kFamily, class Act, class State, int kTiles>
bool launch_paged_tiles(const PagedStep& step, const Device& device, cudaStream_t stream) {
  PagedLaunch launch = choose_paged_launch(step, device);
  const PagedTileLayout layout = paged_tile_layout(step, sizeof(State), sizeof(Act), kTiles);
  while (launch.warps > 1 && launch.warps * layout.total > device.shared_bytes_per_block)
    launch.warps /= 2;
  if (layout.total > device.shared_bytes_per_block) return false;
  const auto kernel = paged_step_kernel<kFamily, Act, State, kTiles>;
  const int bytes = launch.warps * layout.total;
  reserve_shared("paged_step", kernel, bytes);
  const int64_t blocks = (launch.items(step) + launch.warps - 1) / launch.warps;
  launch_dependent("paged_step", kernel,
                   dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(step.sequences)),
                   32 * launch.warps, bytes, stream, step, launch, layout);
  return true;
}

// A state's rows must be cut into blocks of columns without rest, and a lane's rows be two.
template <replayssm_family kFamily, class Act, class State>
bool launch_paged_window(const PagedStep& step, const Device& device, cudaStream_t stream) {
  constexpr int kColumns = 64 / (sizeof(State) < sizeof(Act) ? sizeof(State) : sizeof(Act));
  if (step.state_dim % kColumns != 0 || step.head_dim % 2 != 0) return false;
  const int tokens = paged_column_tokens(kFamily != REPLAYSSM_MAMBA2);
  const int window = paged_window_of(step);
  if (window <= tokens) return launch_paged_tiles<kFamily, Act, State, 1>(step, device, stream);
  if (window <= 2 * tokens) return launch_paged_tiles<kFamily, Act, State, 2>(step, device, stream);
  if (window <= 4 * tokens) return launch_paged_tiles<kFamily, Act, State, 4>(step, device, stream);
  if constexpr (kFamily != REPLAYSSM_MAMBA2)
    return launch_paged_tiles<kFamily, Act, State, 8>(step, device, stream);
  return false;
}

// States in fp32, or 16 bits where activations have so few.
template <replayssm_family kFamily, class Act>
bool launch_paged_types(const PagedStep& step, const Device& device, cudaStream_t stream) {
  if (step.state.dtype == REPLAYSSM_FLOAT32)
    return launch_paged_window<kFamily, Act, float>(step, device, stream);
  if constexpr (!std::is_same_v<Act, float>)
    if (step.state.dtype == REPLAYSSM_FLOAT16)
      return launch_paged_window<kFamily, Act, Fp16>(step, device, stream);
  if constexpr (std::is_same_v<Act, Bf16>)
    if (step.state.dtype == REPLAYSSM_BFLOAT16)
      return launch_paged_window<kFamily, Act, Bf16>(step, device, stream);
  return false;
}

}  // namespace replayssm::cuda
