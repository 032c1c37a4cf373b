// Attention and MLP layers, and the packing that all layers share.

#include <algorithm>
#include <cmath>
#include <utility>

#include "model/layers.h"

namespace replayssm {
namespace {

// Vectors one behind another; absent ones are left out.
std::vector<float> joined(std::initializer_list<const Tensor*> parts) {
  std::vector<float> all;
  for (const Tensor* part : parts) {
    const auto values = floats_of(*part);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

Array<float> pack_frequencies(Context& context) {
  const AttentionConfig& c = context.config.attention;
  Array<float> frequency(c.rotary_dim / 2);
  for (int64_t i = 0; i < frequency.size(); ++i)
    frequency[i] = static_cast<float>(
        std::pow(c.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(c.rotary_dim)));
  return placed(std::move(frequency), context);
}

}  // namespace

std::vector<float> floats_of(const Tensor& tensor) {
  return tensor ? tensor.to_floats() : std::vector<float>();
}

Array<float> placed(Array<float> values, Context& context) {
  Memory& memory = context.backend.memory();
  if (&memory == &host_memory() || values.size() == 0) return values;
  Array<float> there(values.size(), memory);
  memory.write(there.data(), values.data(), values.bytes());
  return there;
}

Array<float> pack_floats(const Tensor& tensor, Context& context, float scale) {
  const auto values = floats_of(tensor);
  Array<float> packed(static_cast<int64_t>(values.size()));
  std::ranges::transform(values, packed.data(), [=](float value) { return value * scale; });
  return placed(std::move(packed), context);
}

ProductPtr pack_product(const std::vector<const Tensor*>& blocks, int64_t in_features,
                        Context& context, std::vector<float> bias) {
  return context.backend.make_product({.blocks = blocks,
                                       .in_features = in_features,
                                       .bias = std::move(bias),
                                       .dtype = context.dtype()});
}

namespace {

void run_pending(Context& context) {
  const PendingProduct p = std::exchange(context.pending, {});
  if (p.product) project(*p.product, p.x, p.rows, p.y, context);
}

// What the ranks' layers give.
void sum_over_ranks(const AddNormParams& params, Context& context) {
  const StageTimer timer(context, Stage::kOther);
  const int64_t rows = params.row_index ? params.hidden_rows : params.rows;
  for (const float* part : {params.delta, params.second}) {
    if (part) {
      context.communicator.all_reduce(const_cast<float*>(part), rows * params.dim,
                                      context.backend.stream_handle());
    }
  }
}

}  // namespace

void project(const Product& product, const void* x, int64_t rows, float* y, Context& context) {
  run_pending(context);
  const StageTimer timer(context, Stage::kMatmul);
  product.apply(x, product.in_features(), rows, y, product.out_features());
}

void project_last(const Product& product, const void* x, int64_t rows, float* y, Context& context) {
  run_pending(context);
  context.pending = {&product, x, rows, y};
}

void add_norm(const AddNormParams& params, Context& context) {
  const PendingProduct& p = context.pending;
  if (!context.is_cut() && p.product && p.y == params.delta &&
      context.backend.product_add_norm(*p.product, p.x, params)) {
    context.pending = {};
    return;
  }
  run_pending(context);
  if (context.is_cut()) sum_over_ranks(params, context);
  const StageTimer timer(context, Stage::kNorm);
  context.backend.add_norm(params);
}

AttentionLayer::AttentionLayer(const AttentionWeights& weights, Context& context)
    : q_norm_(pack_floats(weights.q_norm, context)),
      k_norm_(pack_floats(weights.k_norm, context)),
      inverse_frequency_(pack_frequencies(context)) {
  const AttentionConfig& c = context.config.attention;
  // One bias vector for the stacked projection; a gate has none.
  std::vector<float> bias = joined({&weights.q_bias, &weights.k_bias, &weights.v_bias});
  if (!bias.empty() && weights.gate) bias.resize(bias.size() + c.heads * c.head_dim);
  in_proj_ = pack_product({&weights.q, &weights.k, &weights.v, &weights.gate},
                          context.config.hidden_size, context, std::move(bias));
  out_proj_ = pack_product({&weights.o}, c.heads * c.head_dim, context, floats_of(weights.o_bias));
}

void AttentionLayer::forward(int64_t index, const void* normed, float* delta,
                             Context& context) const {
  const AttentionConfig& c = context.config.attention;
  const int64_t tokens = context.tokens(), rows = in_proj_->out_features();
  float* q = context.projected.get(tokens * rows);
  project(*in_proj_, normed, tokens, q, context);
  float* k = q + c.heads * c.head_dim;
  float* v = k + c.kv_heads * c.head_dim;
  const float* gate = v + c.kv_heads * c.head_dim;
  std::byte* out = context.activated.get(tokens * c.heads * c.head_dim * context.element_bytes());
  {
    const StageTimer timer(context, Stage::kAttention);
    context.backend.attend({.q = q,
                            .q_stride = rows,
                            .k = k,
                            .v = v,
                            .kv_stride = rows,
                            .heads = c.heads,
                            .kv_heads = c.kv_heads,
                            .head_dim = c.head_dim,
                            .q_norm = c.qk_norm ? q_norm_.data() : nullptr,
                            .k_norm = c.qk_norm ? k_norm_.data() : nullptr,
                            .norm_dim = c.head_dim,
                            .eps = context.config.norm_eps,
                            .inverse_frequency = inverse_frequency_.data(),
                            .rotary_dim = c.rotary_dim,
                            .scale = c.scale,
                            .gate = c.output_gate ? gate : nullptr,
                            .cache_k = context.state->kv_keys[index],
                            .cache_v = context.state->kv_values[index],
                            .block_size = context.state->kv_block_size,
                            .out = out});
  }
  project_last(*out_proj_, out, tokens, delta, context);
}

MlpGate mlp_gate_of(const ModelConfig& config) {
  return config.activation == MlpActivation::kSwiGlu ? MlpGate::kSwiGlu : MlpGate::kReluSquared;
}

MlpLayer::MlpLayer(const MlpWeights& weights, int64_t in_features, Context& context,
                   float gate_scale)
    : intermediate_(weights.up.elements() / in_features), gate_scale_(gate_scale) {
  up_ = pack_product({&weights.gate, &weights.up}, in_features, context,
                     joined({&weights.gate_bias, &weights.up_bias}));
  down_ = pack_product({&weights.down}, intermediate_, context, floats_of(weights.down_bias));
}

void MlpLayer::forward(const void* x, int64_t rows, float* y, bool last, Context& context) const {
  float* up = context.projected.get(rows * up_->out_features());
  std::byte* activated = context.activated.get(rows * intermediate_ * context.element_bytes());
  context.backend.gated_product({.up = up_.get(),
                                 .x = x,
                                 .rows = rows,
                                 .gate = mlp_gate_of(context.config),
                                 .scale = gate_scale_,
                                 .product = up,
                                 .dim = intermediate_,
                                 .y = activated});
  (last ? project_last : project)(*down_, activated, rows, y, context);
}

}  // namespace replayssm
