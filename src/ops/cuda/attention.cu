// Attention over a paged cache: checks, memory, choice of the kernel.

#include "ops/cuda/attention.h"

#include "core/check.h"
#include "ops/cuda/attention_instances.h"
#include "ops/cuda/check_rows.h"
#include "ops/cuda/dependent_launch.cuh"

namespace replayssm::cuda {
namespace {

// Offsets in bytes of what a workspace holds.
struct AttentionWorkspace {
  int64_t partial_sum = 0, total = 0;
  int part_rows = 0;
};
AttentionWorkspace attention_workspace(const AttentionShape& shape) {
  const AttentionCut cut = attention_cut(shape);
  AttentionWorkspace w;
  if (cut.splits == 1) return w;
  w.part_rows = static_cast<int>(shape.max_window * cut.group);
  const int64_t rows = shape.sequences * shape.kv_heads * cut.splits * w.part_rows;
  w.partial_sum = rows * shape.head_dim * int64_t{sizeof(float)};
  w.total = w.partial_sum + rows * int64_t{sizeof(float2)};
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
  check_grid_sequences(p.batch.sequences);
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

template <DType kType>
bool launch_tiles(const AttentionCall& call, cudaStream_t stream) {
  if (call.cut.rows == kSmallTile) return launch_attention<kType, kSmallTile>(call, stream);
  return launch_attention<kType, 64>(call, stream);
}

void launch(const AttentionCall& call, cudaStream_t stream) {
  const int64_t dim = call.p.shape.head_dim;
  switch (call.p.cache.dtype) {
    case DType::kBFloat16:
      if (launch_tiles<DType::kBFloat16>(call, stream)) return;
      break;
    case DType::kFloat16:
      if (launch_tiles<DType::kFloat16>(call, stream)) return;
      break;
    default:
      if (dim % 8 == 0 && (dim <= 256 || dim == 576)) return launch_attention_single(call, stream);
  }
  fail("head_dim: expected 64, 80, 96, 128, 192, 256 or 576, got ", dim);
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
  call.kv_heads = FastDivide(static_cast<uint32_t>(p.cache.kv_heads));
  call.group = FastDivide(static_cast<uint32_t>(call.cut.group));
  call.plan = static_cast<const AttentionPlan*>(p.plan);
  const AttentionWorkspace w = attention_workspace(p.shape);
  auto* base = static_cast<std::byte*>(p.workspace);
  call.partial = reinterpret_cast<float*>(base);
  call.partial_sum = reinterpret_cast<float2*>(base + w.partial_sum);
  call.part_rows = w.part_rows;
  launch(call, stream);
  if (call.cut.splits > 1) join_attention(call, stream);
}

}  // namespace replayssm::cuda
