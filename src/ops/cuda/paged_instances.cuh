// Picks an instantiation of the paged decode kernels and launches it.
#pragma once

#include "core/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/paged_instances.h"
#include "ops/cuda/paged_single.cuh"
#include "ops/cuda/paged_tokens.cuh"
#include "ops/cuda/paged_window.cuh"

namespace replayssm::cuda {

template <replayssm_family kFamily, class Act, class State, int kState>
bool launch_paged_state(const PagedStep& step, const Device& device, cudaStream_t stream) {
  if (step.state_dim != kState) return false;
  const bool single = step.rule == REPLAYSSM_PAGED_SINGLE;
  const bool few = single ? kState != 128 : step.max_window <= kPagedTokens;
  PagedLaunch launch = few ? choose_paged_tiles(step, sizeof(State), sizeof(Act), device)
                           : choose_paged_launch(step, sizeof(State), device);
  if (launch.bytes() > device.shared_bytes_per_block) return false;
  auto* kernel = few ? paged_tokens_kernel<kFamily, Act, State, kState>
                     : paged_window_kernel<kFamily, Act, State, kState>;
  if constexpr (kState == 128)
    if (single && !few) kernel = paged_single_kernel<kFamily, Act, State, kState>;
  reserve_shared("paged_step", kernel, launch.bytes());
  launch_dependent(
      "paged_step", kernel,
      dim3(static_cast<unsigned>(launch.items(step)), static_cast<unsigned>(step.sequences)), 32,
      launch.bytes(), stream, step, launch);
  return true;
}

template <replayssm_family kFamily, class Act, class State>
bool launch_paged_dims(const PagedStep& step, const Device& device, cudaStream_t stream) {
  if (launch_paged_state<kFamily, Act, State, 128>(step, device, stream)) return true;
  if constexpr (kFamily == REPLAYSSM_MAMBA2)
    return launch_paged_state<kFamily, Act, State, 256>(step, device, stream);
  return false;
}

// States in fp32, or 16 bits where activations have so few.
template <replayssm_family kFamily, class Act>
bool launch_paged_types(const PagedStep& step, const Device& device, cudaStream_t stream) {
  if (step.state.dtype == REPLAYSSM_FLOAT32)
    return launch_paged_dims<kFamily, Act, float>(step, device, stream);
  if constexpr (!std::is_same_v<Act, float>)
    if (step.state.dtype == REPLAYSSM_FLOAT16)
      return launch_paged_dims<kFamily, Act, Fp16>(step, device, stream);
  if constexpr (std::is_same_v<Act, Bf16>)
    if (step.state.dtype == REPLAYSSM_BFLOAT16)
      return launch_paged_dims<kFamily, Act, Bf16>(step, device, stream);
  return false;
}

}  // namespace replayssm::cuda
