#include "ops/cuda/step_instances.cuh"

namespace replayssm::cuda {

template <>
void launch_step<Family::kGatedDelta, DType::kFloat32>(const RecurrentStepParams& params,
                                                       const StepLaunch& launch, int64_t blocks,
                                                       cudaStream_t stream) {
  launch_state_dim<Family::kGatedDelta, float, 128>(params, launch, blocks, stream);
}

}  // namespace replayssm::cuda
