// Attention, MLP and mixture-of-experts layers, and the packing that all layers share.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "model/cpu/layers.h"
#include "ops/cpu/dense.h"

namespace replayssm::cpu {
namespace {

// Vectors one behind another; absent ones are left out.
std::vector<float> joined(std::initializer_list<const Tensor*> parts) {
  std::vector<float> all;
  for (const Tensor* part : parts) {
    if (!*part) continue;
    const auto values = part->to_floats();
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

// Absent when empty.
Tensor view_of(const std::vector<float>& values) {
  Tensor tensor;
  tensor.shape = {static_cast<int64_t>(values.size())};
  if (!values.empty()) tensor.data = reinterpret_cast<const std::byte*>(values.data());
  return tensor;
}

}  // namespace

Array<float> pack_floats(const Tensor& tensor, float scale) {
  if (!tensor) return {};
  const auto values = tensor.to_floats();
  Array<float> packed(static_cast<int64_t>(values.size()));
  std::ranges::transform(values, packed.data(), [=](float value) { return value * scale; });
  return packed;
}

Linear pack_linear(const std::vector<const Tensor*>& blocks, int64_t in_features, Context& context,
                   const Tensor* bias) {
  std::vector<WeightRows> rows;
  for (const Tensor* block : blocks) {
    if (*block) rows.push_back({block->data, block->dtype, block->elements() / in_features});
  }
  const auto bias_values = bias && *bias ? bias->to_floats() : std::vector<float>();
  return Linear(rows, in_features, context.dtype, context.pool,
                bias_values.empty() ? nullptr : bias_values.data());
}

void project(const Linear& linear, const void* x, float* y, Context& context) {
  const StageTimer timer(context.times.matmul);
  linear.apply(x, linear.in_features(), context.tokens, y, linear.out_features(), context.pool);
}

AttentionLayer::AttentionLayer(const AttentionWeights& weights, Context& context)
    : q_norm_(pack_floats(weights.q_norm)), k_norm_(pack_floats(weights.k_norm)) {
  const AttentionConfig& c = context.config.attention;
  // One bias vector for the stacked projection; a gate has none.
  std::vector<float> bias = joined({&weights.q_bias, &weights.k_bias, &weights.v_bias});
  if (!bias.empty() && weights.gate) bias.resize(bias.size() + c.heads * c.head_dim);
  const Tensor stacked = view_of(bias);
  in_proj_ = pack_linear({&weights.q, &weights.k, &weights.v, &weights.gate},
                         context.config.hidden_size, context, &stacked);
  out_proj_ = pack_linear({&weights.o}, c.heads * c.head_dim, context, &weights.o_bias);
  inverse_frequency_ = Array<float>(c.rotary_dim / 2);
  for (int64_t i = 0; i < inverse_frequency_.size(); ++i)
    inverse_frequency_[i] = static_cast<float>(
        std::pow(c.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(c.rotary_dim)));
}

void AttentionLayer::forward(int64_t index, const void* normed, float* delta,
                             Context& context) const {
  const AttentionConfig& c = context.config.attention;
  const int64_t tokens = context.tokens, rows = in_proj_.out_features();
  float* q = context.projected.get(tokens * rows);
  project(in_proj_, normed, q, context);
  float* k = q + c.heads * c.head_dim;
  float* v = k + c.kv_heads * c.head_dim;
  const float* gate = v + c.kv_heads * c.head_dim;
  float* out = context.mixed.get(tokens * c.heads * c.head_dim);
  std::byte* gated = context.activated.get(tokens * c.heads * c.head_dim * context.element_bytes());
  {
    const StageTimer timer(context.times.attention);
    ThreadPool& pool = context.pool;
    if (c.qk_norm) {
      const float eps = context.config.norm_eps;
      head_rms_norm(q, rows, q_norm_.data(), tokens, c.heads, c.head_dim, eps, pool);
      head_rms_norm(k, rows, k_norm_.data(), tokens, c.kv_heads, c.head_dim, eps, pool);
    }
    if (c.rotary_dim > 0) {
      for (auto [x, heads] : {std::pair{q, c.heads}, {k, c.kv_heads}})
        rotary(x, rows, context.token_position.data(), inverse_frequency_.data(), tokens, heads,
               c.head_dim, c.rotary_dim, pool);
    }
    const Batch& batch = *context.batch;
    const KvCache cache{.k = context.state->kv_keys[index],
                        .v = context.state->kv_values[index],
                        .dtype = context.dtype,
                        .block_size = context.state->kv_block_size,
                        .kv_heads = c.kv_heads,
                        .head_dim = c.head_dim};
    const KvBatch kv{.sequences = batch.sequences(),
                     .query_start = batch.query_start.data(),
                     .position = batch.position.data(),
                     .block_table = batch.block_table.data(),
                     .block_table_stride = batch.block_table_stride};
    store_kv(cache, kv, k, v, rows, pool);
    paged_attention(cache, kv, q, rows, c.heads, c.scale, out, pool);
    if (c.output_gate) {
      sigmoid_gate(out, gate, rows, tokens, c.heads * c.head_dim, gated, context.dtype, pool);
    } else {
      convert_rows(out, c.heads * c.head_dim, tokens, c.heads * c.head_dim, gated, context.dtype,
                   pool);
    }
  }
  project(out_proj_, gated, delta, context);
}

MlpLayer::MlpLayer(const MlpWeights& weights, int64_t in_features, Context& context,
                   float gate_scale)
    : intermediate_(weights.up.elements() / in_features) {
  const std::vector<float> bias = joined({&weights.gate_bias, &weights.up_bias});
  const Tensor stacked = view_of(bias);
  up_ = pack_linear({&weights.gate, &weights.up}, in_features, context, &stacked);
  if (gate_scale != 1) {
    gate_scale_ = Array<float>(intermediate_);
    std::ranges::fill(gate_scale_, gate_scale);
  }
  down_ = pack_linear({&weights.down}, intermediate_, context, &weights.down_bias);
}

void MlpLayer::forward(const void* x, int64_t rows, float* y, Context& context) const {
  float* up = context.projected.get(rows * up_.out_features());
  std::byte* activated = context.activated.get(rows * intermediate_ * context.element_bytes());
  {
    const StageTimer timer(context.times.matmul);
    up_.apply(x, up_.in_features(), rows, up, up_.out_features(), context.pool);
  }
  {
    const StageTimer timer(context.times.other);
    if (gate_scale_.size()) {
      scale_columns(up, up_.out_features(), gate_scale_.data(), rows, intermediate_, context.pool);
    }
    if (context.config.activation == MlpActivation::kSwiGlu) {
      swiglu(up, rows, intermediate_, activated, context.dtype, context.pool);
    } else {
      relu_squared(up, rows, intermediate_, activated, context.dtype, context.pool);
    }
  }
  const StageTimer timer(context.times.matmul);
  down_.apply(activated, intermediate_, rows, y, down_.out_features(), context.pool);
}

MoeLayer::MoeLayer(const MoeWeights& weights, Context& context)
    : correction_bias_(pack_floats(weights.correction_bias)) {
  const int64_t hidden = context.config.hidden_size, latent = context.config.moe.latent;
  // Expert choice is a decision, not a sum: the router stays in fp32.
  router_ = Linear({{weights.router.data, weights.router.dtype, context.config.moe.experts}},
                   hidden, DType::kFloat32, context.pool);
  const int64_t width = latent > 0 ? latent : hidden;
  for (const MlpWeights& expert : weights.experts) experts_.emplace_back(expert, width, context);
  if (weights.shared.up) shared_ = MlpLayer(weights.shared, hidden, context);
  if (weights.shared_gate) shared_gate_ = pack_linear({&weights.shared_gate}, hidden, context);
  if (latent > 0) {
    latent_in_ = pack_linear({&weights.latent_in}, hidden, context);
    latent_out_ = pack_linear({&weights.latent_out}, latent, context);
  }
}

int64_t MoeLayer::weight_bytes() const {
  int64_t bytes = router_.weight_bytes() + shared_.weight_bytes() + shared_gate_.weight_bytes() +
                  latent_in_.weight_bytes() + latent_out_.weight_bytes();
  for (const MlpLayer& expert : experts_) bytes += expert.weight_bytes();
  return bytes;
}

void MoeLayer::forward(const void* normed, const float* normed_wide, float* delta,
                       Context& context) const {
  const MoeConfig& c = context.config.moe;
  const int64_t tokens = context.tokens, hidden = context.config.hidden_size;
  float* logits = context.router_logits.get(tokens * c.experts);
  project(router_, normed_wide, logits, context);
  {
    const StageTimer timer(context.times.other);
    route_experts({.logits = logits,
                   .correction_bias = correction_bias_.size() ? correction_bias_.data() : nullptr,
                   .rows = tokens,
                   .experts = c.experts,
                   .top_k = c.top_k,
                   .groups = c.groups,
                   .top_groups = c.top_groups,
                   .sigmoid = c.sigmoid_scores,
                   .renormalize = c.renormalize,
                   .scale = c.scale,
                   .expert = context.expert.get(tokens * c.top_k),
                   .weight = context.expert_weight.get(tokens * c.top_k)},
                  context.pool);
  }
  if (c.latent > 0) {
    float* latent = context.latent.get(tokens * c.latent);
    std::byte* rounded = context.latent_in.get(tokens * c.latent * context.element_bytes());
    project(latent_in_, normed, latent, context);
    convert_rows(latent, c.latent, tokens, c.latent, rounded, context.dtype, context.pool);
    run_experts(rounded, c.latent, latent, context);
    convert_rows(latent, c.latent, tokens, c.latent, rounded, context.dtype, context.pool);
    project(latent_out_, rounded, delta, context);
  } else {
    run_experts(normed, hidden, delta, context);
  }
  if (!shared_.present()) return;
  float* shared = context.expert_out.get(tokens * hidden);
  shared_.forward(normed, tokens, shared, context);
  if (shared_gate_.out_features() > 0) {
    float* gate = context.router_logits.get(tokens);
    project(shared_gate_, normed, gate, context);
    for (int64_t t = 0; t < tokens; ++t) {
      const float scale = 1.0f / (1.0f + std::exp(-gate[t]));
      for (int64_t i = 0; i < hidden; ++i) shared[t * hidden + i] *= scale;
    }
  }
  add_scaled(shared, 1.0f, tokens * hidden, delta, context.pool);
}

// y = sum over the chosen experts of weight * expert(x). x, y: [tokens, width].
void MoeLayer::run_experts(const void* x, int64_t width, float* y, Context& context) const {
  const MoeConfig& c = context.config.moe;
  const int64_t tokens = context.tokens, row_bytes = width * context.element_bytes();
  const int32_t* chosen = context.expert.get(0);
  const float* weights = context.expert_weight.get(0);
  std::fill_n(y, tokens * width, 0.0f);
  std::byte* gathered = context.gathered.get(tokens * row_bytes);
  float* out = context.expert_out.get(tokens * width);
  std::vector<std::vector<int64_t>> choices(static_cast<size_t>(c.experts));
  for (int64_t i = 0; i < tokens * c.top_k; ++i)
    choices[static_cast<size_t>(chosen[i])].push_back(i);
  for (size_t expert = 0; expert < choices.size(); ++expert) {
    const auto& mine = choices[expert];
    if (mine.empty()) continue;
    for (size_t r = 0; r < mine.size(); ++r)
      std::memcpy(gathered + r * row_bytes,
                  static_cast<const std::byte*>(x) + mine[r] / c.top_k * row_bytes,
                  static_cast<size_t>(row_bytes));
    experts_[expert].forward(gathered, static_cast<int64_t>(mine.size()), out, context);
    const StageTimer timer(context.times.other);
    for (size_t r = 0; r < mine.size(); ++r) {
      float* row = y + mine[r] / c.top_k * width;
      for (int64_t i = 0; i < width; ++i) row[i] += weights[mine[r]] * out[r * width + i];
    }
  }
}

}  // namespace replayssm::cpu
