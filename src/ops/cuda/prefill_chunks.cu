#include "ops/cuda/prefill_chunks.cuh"

#include "ops/cuda/prefill_instances.h"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {
namespace {

template <class State, int kWarps>
void launch(const RecurrentPrefillParams& p, cudaStream_t stream) {
  const auto kernel = prefill_chunks_kernel<State, kWarps>;
  constexpr int kBytes = ChunkTile<kWarps>::kBytes;
  reserve_shared("recurrent_prefill", kernel, kBytes);
  launch_dependent(
      "recurrent_prefill", kernel,
      dim3(static_cast<unsigned>(p.shape.heads), static_cast<unsigned>(p.batch.sequences)),
      32 * kWarps, kBytes, stream, p);
}

template <int kWarps>
void launch(const RecurrentPrefillParams& p, cudaStream_t stream) {
  switch (p.state.checkpoint_dtype) {
    case DType::kBFloat16: return launch<Bf16, kWarps>(p, stream);
    case DType::kFloat16: return launch<Fp16, kWarps>(p, stream);
    default: return launch<float, kWarps>(p, stream);
  }
}

}  // namespace

bool launch_prefill_chunks(const RecurrentPrefillParams& p, cudaStream_t stream) {
  if (p.shape.family != Family::kMamba2 || p.shape.state_dim != ChunkTile<1>::kState) return false;
  if (p.state.activation_dtype != DType::kBFloat16) return false;
  if (!rows_aligned(p.v, p.v_stride * 2) || !rows_aligned(p.k, p.k_stride * 2) ||
      !rows_aligned(p.q, p.q_stride * 2) || !rows_aligned(p.z, p.z_stride * 2) ||
      !rows_aligned(p.o) || !rows_aligned(p.state.checkpoint) ||
      !rows_aligned(p.state.read_copy.data))
    return false;
  switch (p.shape.head_dim) {
    case 64: launch<4>(p, stream); return true;
    case 80: launch<5>(p, stream); return true;
    case 128: launch<8>(p, stream); return true;
    default: return false;
  }
}

}  // namespace replayssm::cuda
