#include "ops/cuda/general_instances.cuh"

namespace replayssm::cuda {

template void launch_general_step<Family::kMamba2>(const RecurrentStepParams&, const TokenLaunch&,
                                                   bool, cudaStream_t);

}  // namespace replayssm::cuda
