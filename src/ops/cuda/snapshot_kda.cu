#include "ops/cuda/snapshot_instances.cuh"

namespace replayssm::cuda {

template void launch_snapshot<Family::kKimiDelta>(const SnapshotStepParams& params, bool aligned,
                                                  cudaStream_t stream);

}  // namespace replayssm::cuda
