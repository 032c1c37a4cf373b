// Accepted paths of tree windows in the cache: a block has one head of a sequence, a thread its own
// 16 bytes of every row, which it moves in the order of the path.

#include "ops/cuda/attention.h"
#include "ops/cuda/check_rows.h"
#include "ops/cuda/dependent_launch.cuh"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    compact_kv_kernel(const __grid_constant__ KvCache cache, const __grid_constant__ KvBatch batch,
                      const int32_t* path, const int32_t* accepted, int words) {
  wait_for_predecessor();
  const int64_t s = blockIdx.y, head = blockIdx.x;
  const int32_t* rows = path + batch.query_start[s];
  const int32_t* blocks = batch.block_table + s * batch.block_table_stride;
  const int count = accepted[s];
  const auto word_of = [&](int row, int word) {
    const int64_t at = batch.position[s] + row;
    const int64_t block = blocks[at / cache.block_size];
    return ((block * cache.kv_heads + head) * cache.block_size + at % cache.block_size) * words +
           word;
  };
  for (int i = 0; i < count; ++i) {
    const int from = rows[i];
    if (from == i) continue;
    for (int word = static_cast<int>(threadIdx.x); word < 2 * words; word += kThreads) {
      uint4* data = static_cast<uint4*>(word < words ? cache.k : cache.v);
      const int column = word % words;
      if (word >= words && cache.v == cache.k) break;
      data[word_of(i, column)] = data[word_of(from, column)];
    }
  }
}

}  // namespace

void compact_kv(const KvCache& cache, const KvBatch& batch, const int32_t* path,
                const int32_t* accepted, cudaStream_t stream) {
  const int64_t bytes = cache.head_dim * dtype_bytes(cache.dtype);
  constexpr int64_t kWord = 16;
  if (bytes % kWord != 0)
    fail("cache.head_dim: expected rows of a multiple of 16 bytes, got ", bytes);
  check_pointer("cache.k", cache.k, kWord);
  check_pointer("cache.v", cache.v, kWord);
  if (batch.sequences == 0) return;
  launch_dependent("compact_kv", compact_kv_kernel,
                   dim3(blocks_for(cache.kv_heads, 1), blocks_for(batch.sequences, 1)), kThreads, 0,
                   stream, cache, batch, path, accepted, static_cast<int>(bytes / kWord));
}

}  // namespace replayssm::cuda
