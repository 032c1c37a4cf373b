// Writes new keys and values into their blocks.
#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/dispatch.h"
#include "ops/cpu/dense.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/kv_store.cc"
#include "hwy/foreach_target.h"
// clang-format off: behind foreach_target.h
#include "ops/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

using namespace replayssm::HWY_NAMESPACE;

// One token's values of all heads: x is [kv_heads, head_dim]; `row` is where the first head's go.
void StoreToken(const KvCache& cache, const float* x, void* to, int64_t row) {
  const hn::ScalableTag<float> d;
  dispatch_float(cache.dtype, [&]<class T>() HWY_ATTR {
    for (int64_t h = 0; h < cache.kv_heads; ++h) {
      const float* from = x + h * cache.head_dim;
      T* y = static_cast<T*>(to) + (row + h * cache.block_size) * cache.head_dim;
      ForVectors(d, static_cast<size_t>(cache.head_dim), [&](size_t i, auto n) HWY_ATTR {
        StoreF32N(LoadF32N(d, from + i, n), d, y + i, n);
      });
    }
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace replayssm::cpu {
namespace {

HWY_EXPORT(StoreToken);

}  // namespace

void store_kv(const KvCache& cache, const KvBatch& batch, const float* k, const float* v,
              int64_t kv_stride, ThreadPool& pool) {
  if (batch.sequences == 0) return;
  const int32_t* starts = batch.query_start;
  const int64_t tokens = starts[batch.sequences] - starts[0];
  REPLAYSSM_CHECK(tokens <= 1 || kv_stride >= cache.kv_heads * cache.head_dim,
                  "kv_stride=", kv_stride, " kv_heads=", cache.kv_heads,
                  " head_dim=", cache.head_dim);
  pool.for_ranges(tokens, [&](int64_t begin, int64_t end, int) {
    for (int64_t token = starts[0] + begin; token < starts[0] + end; ++token) {
      const int64_t s = std::upper_bound(starts, starts + batch.sequences, token) - starts - 1;
      const int64_t position = batch.position[s] + token - starts[s];
      const int64_t block =
          batch.block_table[s * batch.block_table_stride + position / cache.block_size];
      const int64_t row = block * cache.kv_heads * cache.block_size + position % cache.block_size;
      HWY_DYNAMIC_DISPATCH(StoreToken)(cache, k + token * kv_stride, cache.k, row);
      HWY_DYNAMIC_DISPATCH(StoreToken)(cache, v + token * kv_stride, cache.v, row);
    }
  });
}

void compact_kv(const KvCache& cache, const KvBatch& batch, const int32_t* path,
                const int32_t* accepted, ThreadPool& pool) {
  const int64_t bytes = cache.head_dim * dtype_bytes(cache.dtype);
  const auto move = [&](int64_t s, int64_t from, int64_t to) {
    const int32_t* blocks = batch.block_table + s * batch.block_table_stride;
    const auto row = [&](int64_t position, int64_t head) {
      const int64_t block = blocks[position / cache.block_size];
      return ((block * cache.kv_heads + head) * cache.block_size + position % cache.block_size) *
             bytes;
    };
    for (int64_t h = 0; h < cache.kv_heads; ++h) {
      for (void* data : {cache.k, cache.v}) {
        std::memcpy(static_cast<char*>(data) + row(to, h), static_cast<char*>(data) + row(from, h),
                    static_cast<size_t>(bytes));
        if (cache.v == cache.k) break;
      }
    }
  };
  pool.for_ranges(batch.sequences, [&](int64_t begin, int64_t end, int) {
    for (int64_t s = begin; s < end; ++s) {
      const int32_t* rows = path + batch.query_start[s];
      for (int64_t i = 0; i < accepted[s]; ++i) {
        if (rows[i] != i) move(s, batch.position[s] + rows[i], batch.position[s] + i);
      }
    }
  });
}

}  // namespace replayssm::cpu

#endif  // HWY_ONCE
