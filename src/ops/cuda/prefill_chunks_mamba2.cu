#include "ops/cuda/prefill_chunks_launch.cuh"

namespace replayssm::cuda {

template <>
bool launch_prefill_chunks<Family::kMamba2>(const RecurrentPrefillParams& p, cudaStream_t stream) {
  switch (p.shape.head_dim) {
    case 64: return launch_chunks<Mamba2Chunks, 4>(p, stream);
    case 80: return launch_chunks<Mamba2Chunks, 5>(p, stream);
    case 128: return launch_chunks<Mamba2Chunks, 8>(p, stream);
    default: return false;
  }
}

}  // namespace replayssm::cuda
