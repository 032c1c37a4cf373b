#include "ops/cuda/prefill_chunks.cuh"

#include "ops/cuda/prefill_delta_chunks.cuh"
#include "ops/cuda/prefill_instances.h"
#include "ops/cuda/prefill_kimi_weights.cuh"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {
namespace {

template <class Chunks>
void launch(const RecurrentPrefillParams& p, cudaStream_t stream) {
  using Tile = typename Chunks::Tile;
  constexpr auto kernel = prefill_chunks_kernel<Chunks>;
  reserve_shared("recurrent_prefill", kernel, Tile::kBytes);
  const int64_t rows = p.shape.heads * p.shape.head_dim;
  launch_dependent(
      "recurrent_prefill", kernel,
      dim3(static_cast<unsigned>(rows / Tile::kDim), static_cast<unsigned>(p.batch.sequences)),
      Tile::kBlockThreads, Tile::kBytes, stream, p);
}

template <int kWarps>
void launch(const RecurrentPrefillParams& p, cudaStream_t stream) {
  const auto start = [&]<class State>() {
    if (p.shape.family == Family::kMamba2) return launch<Mamba2Chunks<State, kWarps>>(p, stream);
    if constexpr (kWarps != 5) {
      if (p.shape.family == Family::kGatedDelta)
        return launch<DeltaChunks<GatedWeights<State, kWarps>>>(p, stream);
      launch<DeltaChunks<KimiWeights<State, kWarps>>>(p, stream);
    }
  };
  switch (p.state.checkpoint_dtype) {
    case DType::kBFloat16: return start.template operator()<Bf16>();
    case DType::kFloat16: return start.template operator()<Fp16>();
    default: return start.template operator()<float>();
  }
}

}  // namespace

bool launch_prefill_chunks(const RecurrentPrefillParams& p, cudaStream_t stream) {
  if (p.shape.state_dim != 128) return false;
  if (is_delta(p.shape.family) && p.shape.head_dim == 80) return false;
  if (p.state.activation_dtype != DType::kBFloat16) return false;
  if (!rows_aligned(p.v, p.v_stride * 2) || !rows_aligned(p.k, p.k_stride * 2) ||
      !rows_aligned(p.q, p.q_stride * 2) || !rows_aligned(p.z, p.z_stride * 2) ||
      !rows_aligned(p.gate, p.gate_stride * 2) || !rows_aligned(p.channel_gate.bias) ||
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
