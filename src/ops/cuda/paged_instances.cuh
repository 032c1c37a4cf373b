// Picks an instantiation of the paged decode kernels and launches it.
#pragma once

#include "ops/cuda/check_cuda.h"
#include "ops/cuda/paged_instances.h"
#include "ops/cuda/paged_single.cuh"
#include "ops/cuda/paged_window.cuh"

namespace replayssm::cuda {

// Blocks of as many warps as fit beside those of others.
inline void fit_warps(PagedLaunch& launch, const Device& device) {
  while (launch.warps > 1 && launch.bytes() > device.shared_bytes_per_block) launch.warps /= 2;
}

inline void launch_paged_kernel(void (*kernel)(PagedStep, PagedLaunch), const PagedStep& step,
                                const PagedLaunch& launch, bool overlaps, cudaStream_t stream) {
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.bytes()),
      "paged_step: shared memory");
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "paged_step: shared memory");
  cudaLaunchConfig_t config{};
  const int64_t blocks = (launch.items(step) + launch.warps - 1) / launch.warps;
  config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(step.sequences));
  config.blockDim = dim3(32 * launch.warps);
  config.dynamicSmemBytes = launch.bytes();
  config.stream = stream;
  // The kernel itself waits for what runs before it in the stream.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = overlaps ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, step, launch), "paged_step");
}

template <replayssm_family kFamily, class Act, class State, int kState>
bool launch_paged_state(const PagedStep& step, const Device& device, bool overlaps,
                        cudaStream_t stream) {
  if (step.state_dim != kState) return false;
  PagedLaunch launch = choose_paged_launch(step, sizeof(State), device);
  fit_warps(launch, device);
  if (launch.rows == 0 || launch.bytes() > device.shared_bytes_per_block) return false;
  launch_paged_kernel(step.rule == REPLAYSSM_PAGED_SINGLE
                          ? paged_single_kernel<kFamily, Act, State, kState>
                          : paged_window_kernel<kFamily, Act, State, kState>,
                      step, launch, overlaps, stream);
  return true;
}

template <replayssm_family kFamily, class Act, class State>
bool launch_paged_dims(const PagedStep& step, const Device& device, bool overlaps,
                       cudaStream_t stream) {
  if (launch_paged_state<kFamily, Act, State, 128>(step, device, overlaps, stream)) return true;
  if constexpr (kFamily == REPLAYSSM_MAMBA2)
    return launch_paged_state<kFamily, Act, State, 256>(step, device, overlaps, stream);
  return false;
}

// States in fp32, or 16 bits where activations have so few.
template <replayssm_family kFamily, class Act>
bool launch_paged_types(const PagedStep& step, const Device& device, bool overlaps,
                        cudaStream_t stream) {
  if (step.state.dtype == REPLAYSSM_FLOAT32)
    return launch_paged_dims<kFamily, Act, float>(step, device, overlaps, stream);
  if constexpr (!std::is_same_v<Act, float>)
    if (step.state.dtype == REPLAYSSM_FLOAT16)
      return launch_paged_dims<kFamily, Act, Fp16>(step, device, overlaps, stream);
  if constexpr (std::is_same_v<Act, Bf16>)
    if (step.state.dtype == REPLAYSSM_BFLOAT16)
      return launch_paged_dims<kFamily, Act, Bf16>(step, device, overlaps, stream);
  return false;
}

}  // namespace replayssm::cuda
