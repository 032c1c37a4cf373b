#include "model/cuda/cuda_backend.h"

#include <algorithm>

#include "ops/cuda/attention_plan.h"
#include "ops/cuda/conv.h"
#include "ops/cuda/dense.h"
#include "ops/cuda/experts.h"
#include "ops/cuda/gates.h"
#include "ops/cuda/layer.h"
#include "ops/cuda/norms.h"
#include "ops/cuda/recurrent.h"
#include "ops/cuda/recurrent_prefill.h"
#include "ops/cuda/slots.h"
#include "ops/cuda/snapshot_step.h"
#include "ops/cuda/vector_width.h"

namespace replayssm {
namespace {

// At more sequences than these the launches that fusion saves cost less than what it adds to every
// block.
constexpr int64_t kMostFused = 64;

cuda::InRows in(const float* data, int64_t stride) { return {data, stride, DType::kFloat32}; }
cuda::OutRows out(float* data, int64_t stride) { return {data, stride, DType::kFloat32}; }

}  // namespace

CudaBackend::CudaBackend(const ModelConfig& config, DType dtype)
    : device_(cuda::current_device()), dtype_(dtype) {
  const KvShape kv = kv_shape(config);
  heads_ = config.count(Mixer::kLatentAttention) > 0 ? config.latent_attention.heads
                                                     : config.attention.heads;
  kv_heads_ = kv.layers > 0 ? kv.heads : 0;
  head_dim_ = kv.head_dim;
}

void CudaBackend::embed(const void* table, const int32_t* ids, int64_t rows, int64_t dim,
                        float scale, float* y) {
  cuda::embed({table, dim, dtype_}, ids, arrays_.drawn, rows, dim, scale, out(y, dim),
              stream_.get());
}

void CudaBackend::add_norm(const AddNormParams& p) { add_norm(p, p.delta, 1); }

void CudaBackend::add_norm(const AddNormParams& p, const float* delta, int64_t parts) {
  normed_ = nullptr;
  cuda::add_rms_norm({.hidden = out(p.hidden, p.dim),
                      .delta = in(delta, p.dim),
                      .delta_parts = parts,
                      .delta_part_stride = p.rows * p.dim,
                      .second = in(p.second, p.dim),
                      .scale = p.scale,
                      .second_scale = p.second_scale,
                      .weight = p.weight,
                      .eps = p.eps,
                      .row_index = p.row_index,
                      .rows = p.rows,
                      .dim = p.dim,
                      .y = {p.y, p.dim, dtype_},
                      .y_wide = out(p.y_wide, p.dim)},
                     stream_.get());
}

void CudaBackend::gated_norm(const GatedNormParams& p) {
  cuda::gated_rms_norm({.x = p.x,
                        .gate = p.gate,
                        .gate_stride = p.gate_stride,
                        .weight = p.weight,
                        .rows = p.rows,
                        .groups = p.groups,
                        .group_dim = p.group_dim,
                        .weight_per_group = p.weight_per_group,
                        .gate_first = p.gate_first,
                        .activation = p.activation,
                        .eps = p.eps,
                        .y = p.y,
                        .y_dtype = p.dtype},
                       stream_.get());
}

void CudaBackend::mlp_gate(MlpGate gate, float* up, float scale, int64_t rows, int64_t dim,
                           void* y) {
  const cuda::OutRows result{y, dim, dtype_};
  if (gate == MlpGate::kSwiGlu) {
    cuda::swiglu(in(up, 2 * dim), scale, rows, dim, result, stream_.get());
  } else {
    cuda::relu_squared(in(up, dim), scale, rows, dim, result, stream_.get());
  }
}

void CudaBackend::scale_columns(float* x, const float* scale, int64_t rows, int64_t dim) {
  cuda::scale_columns(out(x, dim), scale, rows, dim, stream_.get());
}

void CudaBackend::round_rows(const float* x, int64_t x_stride, int64_t rows, int64_t dim, void* y) {
  cuda::convert_rows(in(x, x_stride), rows, dim, {y, dim, dtype_}, stream_.get());
}

void CudaBackend::copy_heads(const float* x, int64_t x_stride, int64_t x_head_stride, int64_t rows,
                             int64_t heads, int64_t dim, float* y, int64_t y_head_stride) {
  cuda::convert_heads(in(x, x_stride), x_head_stride, rows, heads, dim,
                      out(y, heads * y_head_stride), y_head_stride, stream_.get());
}

void CudaBackend::mamba2_gates(const Mamba2GateParams& p) {
  cuda::mamba2_gates({.dt = p.dt,
                      .dt_stride = p.dt_stride,
                      .dt_bias = p.dt_bias,
                      .a = p.a,
                      .dt_min = p.dt_min,
                      .dt_max = p.dt_max,
                      .tokens = p.tokens,
                      .heads = p.heads,
                      .b = p.b,
                      .g = p.g},
                     stream_.get());
}

void CudaBackend::delta_gates(const DeltaGateParams& p) {
  cuda::delta_gates({.beta = p.beta,
                     .alpha = p.alpha,
                     .stride = p.stride,
                     .dt_bias = p.dt_bias,
                     .a = p.a,
                     .tokens = p.tokens,
                     .heads = p.heads,
                     .b = p.b,
                     .g = p.g},
                    stream_.get());
}

void CudaBackend::plan_part(AttentionPart& part, int64_t first, int64_t sequences, int64_t tokens,
                            int64_t window) {
  const PassArrays& a = arrays_;
  part.batch = {.sequences = sequences,
                .query_start = a.query_start + first,
                .position = a.position + first,
                .block_table = a.block_table + first * a.block_table_stride,
                .block_table_stride = a.block_table_stride,
                .ancestors = a.ancestors};
  if (sequences == 0) return;
  part.shape = {.sequences = sequences,
                .tokens = tokens,
                .max_window = window,
                .max_context = a.block_table_stride * a.block_size,
                .heads = heads_,
                .kv_heads = kv_heads_,
                .head_dim = head_dim_};
  part.workspace.get(cuda::attention_workspace_bytes(part.shape));
  std::byte* plan = part.plan.get(cuda::attention_plan_bytes(part.shape));
  cuda::plan_attention(part.shape, part.batch, plan, stream_.get());
}

void CudaBackend::reserve_attention(const PassLimits& limits) {
  if (kv_heads_ == 0) return;
  // Few sequences and short windows are cut into many ranges: the largest pass is not the neediest.
  const auto take = [&](AttentionPart& part, int64_t longest_window) {
    const int64_t cut = cuda::longest_cut_window(heads_ / kv_heads_, head_dim_);
    int64_t plan = 0, workspace = 0;
    for (int64_t sequences = 1; sequences <= limits.sequences; ++sequences) {
      for (const int64_t window : {std::min(cut, longest_window), longest_window}) {
        const cuda::AttentionShape shape{.sequences = sequences,
                                         .tokens = limits.tokens,
                                         .max_window = window,
                                         .max_context = limits.context,
                                         .heads = heads_,
                                         .kv_heads = kv_heads_,
                                         .head_dim = head_dim_};
        plan = std::max(plan, cuda::attention_plan_bytes(shape));
        workspace = std::max(workspace, cuda::attention_workspace_bytes(shape));
      }
    }
    part.plan.get(plan);
    part.workspace.get(workspace);
  };
  take(decoding_, limits.window);
  take(prefilling_, limits.tokens);
}

void CudaBackend::begin_pass(const PassArrays& arrays, const StateView& /*state*/) {
  arrays_ = arrays;
  normed_ = nullptr;
  // Steps come in few sizes and again and again.
  linear_.tune(arrays.sequences > 0 && arrays.decodes == arrays.sequences);
  if (kv_heads_ == 0) return;
  const int64_t prefills = arrays.sequences - arrays.decodes;
  const int64_t window = arrays.longest_step;
  start_stage();
  plan_part(decoding_, 0, arrays.decodes, arrays.decodes * window, window);
  plan_part(prefilling_, arrays.decodes, prefills, arrays.tokens, arrays.longest_window);
  end_stage(Stage::kAttention);
}

void CudaBackend::conv(const ConvParams& params) {
  if (arrays_.sequences == 0) return;
  cuda::causal_conv(params, arrays_.longest_window, stream_.get());
}

void CudaBackend::recurrent_step(const RecurrentStepParams& params) {
  void* workspace = step_.get(cuda::recurrent_workspace_bytes(params, device_));
  cuda::recurrent_step(params, workspace, device_, stream_.get());
}

bool CudaBackend::fuses(const LayerStepParams& p) const {
  const auto aligned = [](const void* rows, int64_t stride) {
    return cuda::rows_aligned(rows, stride * dtype_bytes(DType::kFloat32));
  };
  return p.batch.sequences > 0 && p.batch.sequences <= kMostFused &&
         aligned(p.conv.x, p.conv.x_stride) && aligned(p.norm.z, p.norm.z_stride);
}

// All sizes together, so that captured passes outlive the first larger one.
void CudaBackend::layer_step(const LayerStepParams& params) {
  LayerStepParams largest = params;
  largest.tokens = std::max(params.tokens, kMostFused * params.batch.ring.max_window);
  void* workspace = step_.get(cuda::layer_workspace_bytes(largest));
  cuda::layer_step(params, workspace, device_, stream_.get());
}

void CudaBackend::recurrent_prefill(const RecurrentPrefillParams& params) {
  cuda::recurrent_prefill(params, stream_.get());
}

void CudaBackend::snapshot_step(const SnapshotStepParams& params) {
  cuda::snapshot_step(params, stream_.get());
}

void CudaBackend::compact(const CompactParams& params) { cuda::compact(params, stream_.get()); }

void CudaBackend::compact_kv(const KvCache& cache, const KvBatch& batch, const int32_t* path,
                             const int32_t* accepted) {
  cuda::compact_kv(cache, batch, path, accepted, stream_.get());
}

void CudaBackend::attend(const AttentionParams& p) {
  const int64_t tokens = arrays_.tokens, width = p.heads * p.head_dim;
  const cuda::OutRows queries{queries_.get(tokens * width * dtype_bytes(dtype_)), width, dtype_};
  if (arrays_.sequences == 0) return;
  const KvCache cache{.k = p.cache_k,
                      .v = p.cache_v,
                      .dtype = dtype_,
                      .block_size = p.block_size,
                      .kv_heads = p.kv_heads,
                      .head_dim = p.head_dim};
  cuda::prepare_attention({.q = in(p.q, p.q_stride),
                           .k = in(p.k, p.kv_stride),
                           .v = in(p.v, p.kv_stride),
                           .tokens = tokens,
                           .heads = p.heads,
                           .q_norm = p.q_norm,
                           .k_norm = p.k_norm,
                           .norm_dim = p.norm_dim,
                           .eps = p.eps,
                           .inverse_frequency = p.inverse_frequency,
                           .rotary_dim = p.rotary_dim,
                           .cache = cache,
                           .batch = {.sequences = arrays_.sequences,
                                     .query_start = arrays_.query_start,
                                     .position = arrays_.position,
                                     .block_table = arrays_.block_table,
                                     .block_table_stride = arrays_.block_table_stride},
                           .depth = arrays_.depth,
                           .q_out = queries},
                          stream_.get());
  for (AttentionPart* part : {&decoding_, &prefilling_}) {
    if (part->batch.sequences == 0) continue;
    cuda::paged_attention({.shape = part->shape,
                           .cache = cache,
                           .batch = part->batch,
                           .q = {queries.data, width, dtype_},
                           .scale = p.scale,
                           .gate = in(p.gate, p.q_stride),
                           .out = {p.out, width, dtype_},
                           .plan = part->plan.get(0),
                           .workspace = part->workspace.get(0)},
                          stream_.get());
  }
}

}  // namespace replayssm
