// Chooses the attention kernel for a head_dim and launches as many blocks as the device holds.
#pragma once

#include "ops/cuda/attention_instances.h"
#include "ops/cuda/attention_mma.cuh"

namespace replayssm::cuda {

template <class Kernel>
void launch_attention_kernel(Kernel kernel, int threads, int bytes, const AttentionCall& call,
                             cudaStream_t stream) {
  constexpr const char* kWhat = "paged_attention";
  reserve_shared(kWhat, kernel, bytes);
  int per_processor = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, threads,
                                                           static_cast<size_t>(bytes)),
             kWhat);
  const int64_t blocks = std::min(call.cut.items * call.p.cache.kv_heads,
                                  int64_t{per_processor} * multiprocessors(kWhat));
  if (blocks > 0)
    launch_dependent(kWhat, kernel, dim3(static_cast<unsigned>(blocks)), threads, bytes, stream,
                     call);
}

template <class T, int kDim, int kRowTiles, bool kShared>
void launch_attention_tile(const AttentionCall& call, cudaStream_t stream) {
  using Tile = AttentionTile<kDim, kRowTiles, kShared>;
  launch_attention_kernel(paged_attention_kernel<T, kDim, kRowTiles, kShared>, Tile::kThreads,
                          Tile::kBytes, call, stream);
}

template <class T, int kRows>
bool launch_attention_tiles(const AttentionCall& call, cudaStream_t stream) {
  const bool shared = call.p.cache.k == call.p.cache.v;
  const auto launch = [&]<int kDim, bool kShared>() {
    if (call.p.cache.head_dim != kDim || shared != kShared) return false;
    constexpr int kTile = kRows == kSmallTile ? kSmallTile : large_tile(kDim);
    launch_attention_tile<T, kDim, kTile / 16, kShared>(call, stream);
    return true;
  };
  return launch.template operator()<64, false>() || launch.template operator()<80, false>() ||
         launch.template operator()<96, false>() || launch.template operator()<128, false>() ||
         launch.template operator()<192, false>() || launch.template operator()<256, false>() ||
         launch.template operator()<64, true>() || launch.template operator()<576, true>();
}

}  // namespace replayssm::cuda
