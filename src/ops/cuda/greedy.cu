// The likeliest tokens of rows, which is all that most batches ask of sampling. A cluster of blocks
// has a row, each of them a part of the vocabulary, of which its threads have several 16 byte runs
// on their way at once.

#include "ops/cuda/greedy.h"

#include <cooperative_groups.h>

#include "ops/cuda/activations.cuh"
#include "ops/cuda/block_reduce.cuh"
#include "ops/cuda/check_rows.h"
#include "ops/cuda/dependent_launch.cuh"

namespace replayssm::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8, kMinThreads = 64, kMaxThreads = 1024, kAtOnce = 8;

// A token as a number: the larger, the likelier; ties go to the lower id. kNothing: no finite logit
// yet; kWrong: NaN or infinity, which no other outdoes.
using Key = unsigned long long;
constexpr Key kNothing = 0, kWrong = ~Key{0};

__device__ inline Key key_of(float x, uint32_t id) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 is 0
  return Key{bits >> 31 ? ~bits : bits | 0x80000000u} << 32 | (~id & 0xffffffffu);
}
__device__ inline int32_t token_of(Key key) {
  return key == kNothing || key == kWrong ? kNoToken : static_cast<int32_t>(~key & 0xffffffffu);
}

// The largest of a warp, in each lane.
__device__ inline Key warp_largest(Key key) {
  for (int d = 16; d > 0; d /= 2) key = max(key, __shfl_xor_sync(kAllLanes, key, d));
  return key;
}

// This thread's part: every blockDim.x-th of the runs [run, end) of kVec logits each.
template <class T, int kVec>
__device__ inline Key largest_of(const T* logits, uint32_t run, uint32_t end) {
  using W = std::conditional_t<kVec == 1, T, uint4>;
  float most = -INFINITY;
  uint32_t first = 0;
  bool wrong = false;
  for (; run < end; run += kAtOnce * blockDim.x) {
    W words[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (run + i * blockDim.x < end)
        words[i] = __ldcs(reinterpret_cast<const W*>(logits) + run + i * blockDim.x);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (run + i * blockDim.x >= end) break;
      float x[kVec];
      if constexpr (kVec == 1) {
        x[0] = to_float(words[i]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          widen<T>(reinterpret_cast<const uint32_t*>(&words[i])[j], x + j * 4 / sizeof(T));
      }
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        wrong |= !(x[e] < INFINITY);
        if (x[e] > most) most = x[e], first = (run + i * blockDim.x) * kVec + e;  // ids ascend
      }
    }
  }
  if (wrong) return kWrong;
  return most > -INFINITY ? key_of(most, first) : kNothing;
}

template <class T, int kVec>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kMaxThreads)
    likeliest_kernel(const __grid_constant__ SampleParams p) {
  release_successor();
  __shared__ Key warp_key[kMaxThreads / 32], block_key;
  const cg::cluster_group cluster = cg::this_cluster();
  const int64_t row = blockIdx.x / kBlocks;
  const auto runs = static_cast<uint32_t>(p.vocab / kVec), part = (runs + kBlocks - 1) / kBlocks,
             begin = cluster.block_rank() * part;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  wait_for_predecessor();
  const T* logits = static_cast<const T*>(p.logits.data) + row * p.logits.stride;
  Key key = largest_of<T, kVec>(logits, begin + threadIdx.x, min(begin + part, runs));
  key = warp_largest(key);
  if (lane == 0) warp_key[warp] = key;
  __syncthreads();
  if (warp == 0) {
    key = warp_largest(lane < static_cast<int>(blockDim.x) / 32 ? warp_key[lane] : kNothing);
    if (lane == 0) block_key = key;
  }
  cluster.sync();
  if (cluster.block_rank() == 0 && warp == 0) {
    key = warp_largest(lane < kBlocks ? *cluster.map_shared_rank(&block_key, lane) : kNothing);
    if (lane == 0) p.token[row] = token_of(key);
  }
  cluster.sync();  // nobody reads this block's memory any more
}

template <class T>
void start(const SampleParams& p, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  // As many threads as run at the same time.
  const int64_t most = kMaxThreads * int64_t{multiprocessors("sample")};
  int threads = kMaxThreads;
  while (threads > kMinThreads && p.rows * kBlocks * threads > most) threads /= 2;
  const bool vectors = p.vocab % kVec == 0 && rows_aligned(p.logits);
  launch_dependent("sample", vectors ? likeliest_kernel<T, kVec> : likeliest_kernel<T, 1>,
                   dim3(blocks_for(p.rows * kBlocks, 1)), threads, 0, stream, p);
}

}  // namespace

void choose_likeliest(const SampleParams& p, cudaStream_t stream) {
  switch (p.logits.dtype) {
    case DType::kBFloat16: return start<Bf16>(p, stream);
    case DType::kFloat16: return start<Fp16>(p, stream);
    default: return start<float>(p, stream);
  }
}

}  // namespace replayssm::cuda
