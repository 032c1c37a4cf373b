// The attention kernels, split over files by element type and kind of tile.
#pragma once

#include "ops/cuda/attention_call.h"

namespace replayssm::cuda {

// For 16-bit caches. kRows: kSmallTile, or 64 for larger ones. False: there is none for this
// head_dim.
template <DType kType, int kRows>
bool launch_attention(const AttentionCall& call, cudaStream_t stream);

// Behind one of these, where sequences may be cut into ranges of keys.
void join_attention(const AttentionCall& call, cudaStream_t stream);

// For float32 caches, any head_dim that the others take.
void launch_attention_single(const AttentionCall& call, cudaStream_t stream);

}  // namespace replayssm::cuda
