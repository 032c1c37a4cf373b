#include "ops/cuda/prefill_instances.cuh"

namespace replayssm::cuda {

template void launch_prefill<Family::kGatedDelta>(const RecurrentPrefillParams& params,
                                                  bool aligned, cudaStream_t stream);

}  // namespace replayssm::cuda
