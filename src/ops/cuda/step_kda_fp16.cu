#include "ops/cuda/step_instances.cuh"

namespace replayssm::cuda {

template <>
void launch_step<Family::kKimiDelta, DType::kFloat16>(const RecurrentStepParams& params,
                                                      const StepLaunch& launch, int64_t blocks,
                                                      cudaStream_t stream) {
  launch_state_dim<Family::kKimiDelta, Fp16, 128>(params, launch, blocks, stream);
}

}  // namespace replayssm::cuda
