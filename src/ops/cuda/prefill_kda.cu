#include "ops/cuda/prefill_instances.cuh"

namespace replayssm::cuda {

template void launch_prefill<Family::kKimiDelta>(const RecurrentPrefillParams& params, bool aligned,
                                                 cudaStream_t stream);

}  // namespace replayssm::cuda
