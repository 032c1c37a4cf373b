#include "ops/cuda/paged_instances.cuh"

namespace replayssm::cuda {

template <>
bool launch_paged<REPLAYSSM_MAMBA2, REPLAYSSM_BFLOAT16>(const PagedStep& step, const Device& device,
                                                        bool overlaps, cudaStream_t stream) {
  return launch_paged_types<REPLAYSSM_MAMBA2, Bf16>(step, device, overlaps, stream);
}

}  // namespace replayssm::cuda
