#include "ops/cuda/step_instances.cuh"

namespace replayssm::cuda {

template <>
void launch_step<Family::kMamba2, DType::kBFloat16>(const RecurrentStepParams& params,
                                                    const StepLaunch& launch, int64_t blocks,
                                                    cudaStream_t stream) {
  launch_state_dim<Family::kMamba2, Bf16, 128>(params, launch, blocks, stream);
}

}  // namespace replayssm::cuda
