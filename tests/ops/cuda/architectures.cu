// A kernel of each kind of decode step, compiled for the oldest and the newest architectures that
// the library is meant for: what only some of them have must be guarded.
#include "ops/cuda/general_instances.cuh"
#include "ops/cuda/paged_tokens.cuh"
#include "ops/cuda/step_kernel.cuh"

namespace replayssm::cuda {

template __global__ void recurrent_step_kernel<Family::kGatedDelta, Bf16, Bf16, void, 128, true,
                                               false>(const __grid_constant__ RecurrentStepParams,
                                                      const __grid_constant__ StepLaunch);
template __global__ void recurrent_step_kernel<Family::kKimiDelta, Bf16, float, void, 128, true,
                                               true>(const __grid_constant__ RecurrentStepParams,
                                                     const __grid_constant__ StepLaunch);
template __global__ void general_step_kernel<Family::kKimiDelta, Bf16, 64, true>(
    const __grid_constant__ RecurrentStepParams, const __grid_constant__ TokenLaunch);
template __global__ void paged_tokens_kernel<REPLAYSSM_GATED_DELTA, Bf16, float, 128>(
    const __grid_constant__ PagedStep, const __grid_constant__ PagedLaunch);

}  // namespace replayssm::cuda
