// Attention over a paged cache: checks, memory, choice of the kernel.

#include "ops/cuda/attention.h"

#include "core/check.h"
#include "ops/cuda/attention_instances.h"
#include "ops/cuda/check_rows.h"

namespace replayssm::cuda {
namespace {

// Offsets in bytes of what a workspace holds.
struct AttentionWorkspace {
  int64_t counters = 0, partial = 0, partial_sum = 0, total = 0;
  int part_rows = 0;
};
AttentionWorkspace attention_workspace(const AttentionShape& shape) {
  const AttentionCut cut = attention_cut(shape);
  AttentionWorkspace w;
  if (cut.splits == 1) return w;
  const auto take = [&](int64_t bytes) {
    const int64_t at = w.total;
    w.total += (bytes + 15) / 16 * 16;
    return at;
  };
  const int64_t heads = shape.sequences * shape.kv_heads;
  w.part_rows = static_cast<int>(shape.max_window * cut.group);
  const int64_t rows = heads * cut.splits * w.part_rows;
  w.counters = take(heads * int64_t{sizeof(int32_t)});
  w.partial = take(rows * shape.head_dim * int64_t{sizeof(float)});
  w.partial_sum = take(rows * int64_t{sizeof(float2)});
  return w;
}

void check(const AttentionParams& p) {
  const AttentionShape& shape = p.shape;
  const KvCache& cache = p.cache;
  const auto same = [](const char* name, int64_t expected, int64_t got) {
    if (expected != got) fail(name, ": expected the shape's ", expected, ", got ", got);
  };
  check_count("cache.kv_heads", cache.kv_heads, 1);
  check_count("cache.block_size", cache.block_size, 1);
  same("cache.kv_heads", shape.kv_heads, cache.kv_heads);
  same("cache.head_dim", shape.head_dim, cache.head_dim);
  if (shape.heads < 1 || shape.heads % cache.kv_heads != 0)
    fail("heads: expected a multiple of the ", cache.kv_heads, " of the keys, got ", shape.heads);
  check_float("cache.dtype", cache.dtype);
  if (p.q.dtype != cache.dtype)
    fail("q: expected the cache's ", dtype_name(cache.dtype), ", got ", dtype_name(p.q.dtype));
  const int64_t width = shape.heads * shape.head_dim;
  check_rows("q", p.q, shape.tokens, width);
  check_rows("out", p.out, shape.tokens, width);
  if (p.gate.data) check_rows("gate", p.gate, shape.tokens, width);
  if (!rows_aligned(p.q)) fail("q: expected rows at multiples of 16 bytes");
  for (const auto& [name, data] : {std::pair<const char*, const void*>{"cache.k", cache.k},
                                   {"cache.v", cache.v},
                                   {"plan", p.plan}})
    check_pointer(name, data, 16);
  check_pointer("batch.block_table", p.batch.block_table, sizeof(int32_t));
  if (attention_workspace(shape).total > 0) check_pointer("workspace", p.workspace, 16);
}

template <int kRows>
bool launch(const AttentionCall& call, cudaStream_t stream) {
  if (call.p.cache.dtype == DType::kBFloat16)
    return launch_attention<DType::kBFloat16, kRows>(call, stream);
  return launch_attention<DType::kFloat16, kRows>(call, stream);
}

}  // namespace

int64_t attention_workspace_bytes(const AttentionShape& shape) {
  return attention_workspace(shape).total;
}

void paged_attention(const AttentionParams& p, cudaStream_t stream) {
  if (p.shape.tokens == 0 || p.batch.sequences == 0) return;
  check(p);
  AttentionCall call;
  call.p = p;
  call.cut = attention_cut(p.shape);
  call.block_size = FastDivide(static_cast<uint32_t>(p.cache.block_size));
  call.plan = static_cast<const AttentionPlan*>(p.plan);
  const AttentionWorkspace w = attention_workspace(p.shape);
  auto* base = static_cast<std::byte*>(p.workspace);
  call.counters = reinterpret_cast<int32_t*>(base + w.counters);
  call.partial = reinterpret_cast<float*>(base + w.partial);
  call.partial_sum = reinterpret_cast<float2*>(base + w.partial_sum);
  call.part_rows = w.part_rows;
  const bool known = p.shape.head_dim <= 256 || p.shape.head_dim == 576;
  if (p.cache.dtype == DType::kFloat32 && known && p.shape.head_dim % 8 == 0)
    return launch_attention_single(call, stream);
  if (p.cache.dtype != DType::kFloat32 &&
      (call.cut.rows == kSmallTile ? launch<kSmallTile>(call, stream) : launch<64>(call, stream)))
    return;
  fail("head_dim: expected 64, 80, 96, 128, 192, 256 or 576, got ", p.shape.head_dim);
}

}  // namespace replayssm::cuda
