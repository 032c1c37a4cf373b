// Latent attention: what is cached per token is one latent vector and one shared part of the keys.

#include "model/layers.h"

namespace replayssm {
namespace {

// Of every head the transpose of [out, in], stacked: what takes queries into the latent space.
std::vector<float> transposed_heads(const Tensor& stacked, int64_t heads) {
  const auto values = stacked.to_floats();
  const int64_t out = stacked.shape[0] / heads, in = stacked.shape[1];
  std::vector<float> result(values.size());
  for (int64_t h = 0; h < heads; ++h) {
    const float* from = values.data() + h * out * in;
    float* to = result.data() + h * out * in;
    for (int64_t i = 0; i < in; ++i) {
      for (int64_t o = 0; o < out; ++o) to[i * out + o] = from[o * in + i];
    }
  }
  return result;
}

ProductPtr pack_heads(const Tensor& stacked, int64_t in_features, int64_t heads, Context& context) {
  return context.backend.make_product(
      {.blocks = {&stacked}, .in_features = in_features, .dtype = context.dtype(), .heads = heads});
}

}  // namespace

LatentAttentionLayer::LatentAttentionLayer(const LatentAttentionWeights& weights, Context& context)
    : in_proj_(pack_product({&weights.q, &weights.latent}, context.config.hidden_size, context)),
      norm_(pack_floats(weights.norm, context)) {
  const LatentAttentionConfig& c = context.config.latent_attention;
  out_proj_ = pack_product({&weights.o}, c.heads * c.value_dim, context);
  const std::vector<float> key = transposed_heads(weights.key_up, c.heads);
  const Tensor key_tensor{.dtype = DType::kFloat32,
                          .shape = {c.heads * c.latent, c.key_dim},
                          .data = reinterpret_cast<const std::byte*>(key.data()),
                          .storage = {}};
  key_ = pack_heads(key_tensor, c.key_dim, c.heads, context);
  value_up_ = pack_heads(weights.value_up, c.latent, c.heads, context);
}

int64_t LatentAttentionLayer::weight_bytes() const {
  return weight_bytes_of(in_proj_, out_proj_, key_, value_up_);
}

float* LatentAttentionLayer::absorb(const float* q, int64_t stride, Context& context) const {
  const LatentAttentionConfig& c = context.config.latent_attention;
  const int64_t tokens = context.tokens(), width = c.heads * c.query_dim();
  std::byte* rounded = context.activated.get(tokens * width * context.element_bytes());
  context.backend.round_rows(q, stride, tokens, width, rounded);
  float* absorbed = context.raised.get(tokens * c.heads * c.cached());
  {
    const StageTimer timer(context, Stage::kMatmul);
    key_->apply(rounded, c.query_dim(), tokens, absorbed, c.cached());
  }
  const StageTimer timer(context, Stage::kAttention);
  context.backend.copy_heads(q + c.key_dim, stride, c.query_dim(), tokens, c.heads, c.shared_dim,
                             absorbed + c.latent, c.cached());
  return absorbed;
}

void LatentAttentionLayer::forward(int64_t index, const void* normed, float* delta,
                                   Context& context) const {
  const LatentAttentionConfig& c = context.config.latent_attention;
  const int64_t tokens = context.tokens(), rows = in_proj_->out_features();
  float* q = context.projected.get(tokens * rows);
  project(*in_proj_, normed, tokens, q, context);
  float* latent = q + c.heads * c.query_dim();
  float* absorbed = absorb(q, rows, context);
  const int64_t read = c.heads * c.cached(), values = c.heads * c.value_dim;
  std::byte* out = context.activated.get(tokens * read * context.element_bytes());
  {
    const StageTimer timer(context, Stage::kAttention);
    context.backend.attend({.q = absorbed,
                            .q_stride = read,
                            .k = latent,
                            .v = latent,
                            .kv_stride = rows,
                            .heads = c.heads,
                            .kv_heads = 1,
                            .head_dim = c.cached(),
                            .k_norm = norm_.data(),
                            .norm_dim = c.latent,
                            .eps = c.norm_eps,
                            .scale = c.scale,
                            .cache_k = context.state->kv_keys[index],
                            .cache_v = context.state->kv_values[index],
                            .block_size = context.state->kv_block_size,
                            .out = out});
  }
  float* read_values = context.projected.get(tokens * values);
  {
    const StageTimer timer(context, Stage::kMatmul);
    value_up_->apply(out, c.cached(), tokens, read_values, c.value_dim);
  }
  std::byte* mixed = context.rounded.get(tokens * values * context.element_bytes());
  context.backend.round_rows(read_values, values, tokens, values, mixed);
  project_last(*out_proj_, mixed, tokens, delta, context);
}

}  // namespace replayssm
