// Latent attention: what is cached per token is one latent vector and one shared part of the keys.

#include <algorithm>

#include "model/cpu/layers.h"
#include "ops/cpu/dense.h"

namespace replayssm::cpu {
namespace {

// Per head the transpose of [out, in]: what takes a query into the latent space.
std::vector<Linear> pack_transposed(const Tensor& stacked, int64_t heads, Context& context) {
  const auto values = stacked.to_floats();
  const int64_t out = stacked.shape[0] / heads, in = stacked.shape[1];
  std::vector<Linear> packed;
  std::vector<float> head(static_cast<size_t>(in * out));
  for (int64_t h = 0; h < heads; ++h) {
    const float* from = values.data() + h * out * in;
    for (int64_t i = 0; i < in; ++i) {
      for (int64_t o = 0; o < out; ++o) head[static_cast<size_t>(i * out + o)] = from[o * in + i];
    }
    packed.emplace_back(std::vector<WeightRows>{{head.data(), DType::kFloat32, in}}, out,
                        context.dtype, context.pool);
  }
  return packed;
}

std::vector<Linear> pack_heads(const Tensor& stacked, int64_t heads, Context& context) {
  const int64_t out = stacked.shape[0] / heads, in = stacked.shape[1];
  std::vector<Linear> packed;
  for (int64_t h = 0; h < heads; ++h) {
    const std::byte* data = stacked.data + h * out * in * dtype_bytes(stacked.dtype);
    packed.emplace_back(std::vector<WeightRows>{{data, stacked.dtype, out}}, in, context.dtype,
                        context.pool);
  }
  return packed;
}

// Head by head: x is [tokens, heads, x_dim] in the activation dtype, of which a head's product
// reads the leading in_features; y is [tokens, heads, y_dim].
void project_heads(const std::vector<Linear>& heads, const std::byte* x, int64_t x_dim, float* y,
                   int64_t y_dim, Context& context) {
  const StageTimer timer(context.times.matmul);
  const auto count = static_cast<int64_t>(heads.size());
  for (int64_t h = 0; h < count; ++h) {
    heads[static_cast<size_t>(h)].apply(x + h * x_dim * context.element_bytes(), count * x_dim,
                                        context.tokens, y + h * y_dim, count * y_dim, context.pool);
  }
}

}  // namespace

LatentAttentionLayer::LatentAttentionLayer(const LatentAttentionWeights& weights, Context& context)
    : in_proj_(pack_linear({&weights.q, &weights.latent}, context.config.hidden_size, context)),
      norm_(pack_floats(weights.norm)) {
  const LatentAttentionConfig& c = context.config.latent_attention;
  out_proj_ = pack_linear({&weights.o}, c.heads * c.value_dim, context);
  key_ = pack_transposed(weights.key_up, c.heads, context);
  value_up_ = pack_heads(weights.value_up, c.heads, context);
}

int64_t LatentAttentionLayer::weight_bytes() const {
  int64_t bytes = in_proj_.weight_bytes() + out_proj_.weight_bytes();
  for (const auto* heads : {&key_, &value_up_}) {
    for (const Linear& head : *heads) bytes += head.weight_bytes();
  }
  return bytes;
}

const float* LatentAttentionLayer::absorb(const float* q, int64_t stride, Context& context) const {
  const LatentAttentionConfig& c = context.config.latent_attention;
  const int64_t tokens = context.tokens, width = c.heads * c.query_dim();
  std::byte* rounded = context.activated.get(tokens * width * context.element_bytes());
  convert_rows(q, stride, tokens, width, rounded, context.dtype, context.pool);
  float* absorbed = context.raised.get(tokens * c.heads * c.cached());
  project_heads(key_, rounded, c.query_dim(), absorbed, c.cached(), context);
  const StageTimer timer(context.times.attention);
  context.pool.for_ranges(tokens, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < c.heads; ++h) {
        std::copy_n(q + t * stride + h * c.query_dim() + c.key_dim, c.shared_dim,
                    absorbed + (t * c.heads + h) * c.cached() + c.latent);
      }
    }
  });
  return absorbed;
}

void LatentAttentionLayer::forward(int64_t index, const void* normed, float* delta,
                                   Context& context) const {
  const LatentAttentionConfig& c = context.config.latent_attention;
  const int64_t tokens = context.tokens, rows = in_proj_.out_features();
  ThreadPool& pool = context.pool;
  float* q = context.projected.get(tokens * rows);
  project(in_proj_, normed, q, context);
  float* latent = q + c.heads * c.query_dim();
  const float* absorbed = absorb(q, rows, context);
  const int64_t read = c.heads * c.cached(), values = c.heads * c.value_dim;
  float* out = context.mixed.get(tokens * read);
  std::byte* rounded = context.activated.get(tokens * read * context.element_bytes());
  {
    const StageTimer timer(context.times.attention);
    head_rms_norm(latent, rows, norm_.data(), tokens, 1, c.latent, c.norm_eps, pool);
    const Batch& batch = *context.batch;
    const KvCache cache{.k = context.state->kv_keys[index],
                        .v = context.state->kv_values[index],
                        .dtype = context.dtype,
                        .block_size = context.state->kv_block_size,
                        .kv_heads = 1,
                        .head_dim = c.cached()};
    const KvBatch kv{.sequences = batch.sequences(),
                     .query_start = batch.query_start.data(),
                     .position = batch.position.data(),
                     .block_table = batch.block_table.data(),
                     .block_table_stride = batch.block_table_stride};
    store_kv(cache, kv, latent, latent, rows, pool);
    paged_attention(cache, kv, absorbed, read, c.heads, c.scale, out, pool);
    convert_rows(out, read, tokens, read, rounded, context.dtype, pool);
  }
  float* read_values = context.projected.get(tokens * values);
  project_heads(value_up_, rounded, c.cached(), read_values, c.value_dim, context);
  std::byte* mixed = context.rounded.get(tokens * values * context.element_bytes());
  convert_rows(read_values, values, tokens, values, mixed, context.dtype, pool);
  project(out_proj_, mixed, delta, context);
}

}  // namespace replayssm::cpu
