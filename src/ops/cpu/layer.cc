// The ops of a layer one behind the other: their results pass through memory that stays in the
// caches.

#include "ops/cpu/layer.h"

#include <cstring>

#include "core/check.h"
#include "ops/check_params.h"
#include "ops/cpu/dense.h"
#include "ops/cpu/recurrent.h"
#include "ops/layer_parts.h"

namespace replayssm::cpu {
namespace {

// The rows of all windows.
struct Rows {
  int64_t begin, count;
};

void form_gates(const LayerStepParams& p, const Rows& rows, const LayerWorkspace& w,
                ThreadPool& pool) {
  const ScalarGates& g = p.gates;
  const int64_t raw = rows.begin * g.stride, heads = rows.begin * p.shape.heads;
  const float* strength = static_cast<const float*>(g.strength) + raw;
  if (p.shape.family == Family::kMamba2) {
    mamba2_gates({.dt = strength,
                  .dt_stride = g.stride,
                  .dt_bias = g.bias,
                  .a = g.a,
                  .dt_min = g.min,
                  .dt_max = g.max,
                  .tokens = rows.count,
                  .heads = p.shape.heads,
                  .b = w.b + heads,
                  .g = w.g + heads},
                 pool);
    return;
  }
  const bool scalar = p.shape.family == Family::kGatedDelta;
  delta_gates({.beta = strength,
               .alpha = scalar ? static_cast<const float*>(g.decay) + raw : nullptr,
               .stride = g.stride,
               .dt_bias = g.bias,
               .a = g.a,
               .tokens = rows.count,
               .heads = p.shape.heads,
               .b = w.b + heads,
               .g = w.g + heads},
              pool);
}

void finish(const LayerStepParams& p, const Rows& rows, const LayerWorkspace& w, ThreadPool& pool) {
  const OutputNorm& n = p.norm;
  const int64_t width = p.shape.heads * p.shape.head_dim, bytes = width * dtype_bytes(p.y_dtype);
  char* const y = static_cast<char*>(p.y);
  gated_rms_norm({.x = w.o + rows.begin * width,
                  .gate = static_cast<const float*>(n.z) + rows.begin * n.z_stride,
                  .gate_stride = n.z_stride,
                  .weight = n.weight,
                  .rows = rows.count,
                  .groups = width / n.group_dim,
                  .group_dim = n.group_dim,
                  .weight_per_group = n.weight_per_group,
                  .gate_first = n.gate_first,
                  .activation = n.activation,
                  .eps = n.eps,
                  .y = y + rows.begin * bytes,
                  .dtype = p.y_dtype},
                 pool);
  // Whatever the gates of padding are.
  for (int64_t s = 0; s < p.batch.sequences; ++s) {
    const int64_t begin = p.batch.query_start[s], end = p.batch.query_start[s + 1];
    if (p.batch.slot[s] < 0) std::memset(y + begin * bytes, 0, (end - begin) * bytes);
  }
}

}  // namespace

int64_t layer_workspace_bytes(const LayerStepParams& p, int threads) {
  return LayerWorkspace(p).bytes + recurrent_workspace_bytes(p.shape, p.batch.ring, threads);
}

void layer_step(const LayerStepParams& p, void* workspace, ThreadPool& pool) {
  check_params(p);
  if (p.projected_dtype != DType::kFloat32)
    fail("projected_dtype: expected float32, got ", dtype_name(p.projected_dtype));
  if (p.batch.sequences == 0) return;
  const Rows rows{p.batch.query_start[0],
                  p.batch.query_start[p.batch.sequences] - p.batch.query_start[0]};
  if (rows.begin + rows.count > p.tokens)
    fail("tokens: expected at least ", rows.begin + rows.count, ", got ", p.tokens);
  if (rows.count == 0) return;
  const LayerWorkspace w(p, workspace);
  causal_conv(conv_part(p, w), pool);
  form_gates(p, rows, w, pool);
  recurrent_step(recurrent_part(p, w), static_cast<char*>(workspace) + w.bytes, pool);
  finish(p, rows, w, pool);
}

}  // namespace replayssm::cpu
