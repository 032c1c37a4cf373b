// How the kernels that take prompts in chunks are launched.
#pragma once

#include "ops/cuda/prefill_chunks.cuh"
#include "ops/cuda/prefill_instances.h"

namespace replayssm::cuda {

template <class Chunks>
void launch_chunks(const RecurrentPrefillParams& p, cudaStream_t stream) {
  using Tile = typename Chunks::Tile;
  constexpr auto kernel = prefill_chunks_kernel<Chunks>;
  reserve_shared("recurrent_prefill", kernel, Tile::kBytes);
  const int64_t rows = p.shape.heads * p.shape.head_dim;
  launch_dependent(
      "recurrent_prefill", kernel,
      dim3(static_cast<unsigned>(rows / Tile::kDim), static_cast<unsigned>(p.batch.sequences)),
      Tile::kBlockThreads, Tile::kBytes, stream, p);
}

// Chunks<State, kWarps> are a family's, for checkpoints of State and kWarps * 16 rows a head. By
// the name of the template alone are instantiations told apart, also where it is an alias.
template <template <class, int> class Chunks, int kWarps>
bool launch_chunks(const RecurrentPrefillParams& p, cudaStream_t stream) {
  switch (p.state.checkpoint_dtype) {
    case DType::kBFloat16: launch_chunks<Chunks<Bf16, kWarps>>(p, stream); break;
    case DType::kFloat16: launch_chunks<Chunks<Fp16, kWarps>>(p, stream); break;
    default: launch_chunks<Chunks<float, kWarps>>(p, stream);
  }
  return true;
}

}  // namespace replayssm::cuda
