#include "ops/cuda/paged_instances.cuh"

namespace replayssm::cuda {

template <>
bool launch_paged<REPLAYSSM_GATED_DELTA, REPLAYSSM_FLOAT32>(const PagedStep& step,
                                                            const Device& device, bool overlaps,
                                                            cudaStream_t stream) {
  return launch_paged_types<REPLAYSSM_GATED_DELTA, float>(step, device, overlaps, stream);
}

}  // namespace replayssm::cuda
