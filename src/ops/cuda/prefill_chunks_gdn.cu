#include "ops/cuda/prefill_chunks_launch.cuh"
#include "ops/cuda/prefill_delta_chunks.cuh"

namespace replayssm::cuda {

template <class State, int kWarps>
using GatedChunks = DeltaChunks<GatedWeights<State, kWarps>>;

template <>
bool launch_prefill_chunks<Family::kGatedDelta>(const RecurrentPrefillParams& p,
                                                cudaStream_t stream) {
  switch (p.shape.head_dim) {
    case 64: return launch_chunks<GatedChunks, 4>(p, stream);
    case 128: return launch_chunks<GatedChunks, 8>(p, stream);
    default: return false;
  }
}

}  // namespace replayssm::cuda
