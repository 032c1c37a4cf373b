#include "model/draft_head.h"

#include <algorithm>

namespace replayssm {
namespace {

// Columns [first, first + hidden) of [hidden, 2 * hidden].
ProductPtr pack_half(const std::vector<float>& fc, int64_t hidden, int64_t first,
                     Context& context) {
  std::vector<float> half(static_cast<size_t>(hidden * hidden));
  for (int64_t row = 0; row < hidden; ++row) {
    std::copy_n(fc.begin() + row * 2 * hidden + first, hidden, half.begin() + row * hidden);
  }
  const Tensor tensor{.dtype = DType::kFloat32,
                      .shape = {hidden, hidden},
                      .data = reinterpret_cast<const std::byte*>(half.data()),
                      .storage = {}};
  return pack_product({&tensor}, hidden, context);
}

}  // namespace

DraftHead::DraftHead(const MtpWeights& weights, Context& context)
    : embedding_norm_(pack_floats(weights.embedding_norm, context)),
      hidden_norm_(pack_floats(weights.hidden_norm, context)),
      norm_(pack_floats(weights.norm, context)) {
  const int64_t hidden = context.config.hidden_size;
  const std::vector<float> fc = floats_of(weights.fc);
  from_embedding_ = pack_half(fc, hidden, 0, context);
  from_hidden_ = pack_half(fc, hidden, hidden, context);
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    layers_.emplace_back(context.config.mtp[i], weights.layers[i], context);
  }
}

int64_t DraftHead::weight_bytes() const {
  int64_t bytes = weight_bytes_of(from_embedding_, from_hidden_);
  for (const DecoderLayer& layer : layers_) bytes += layer.weight_bytes();
  return bytes;
}

const void* DraftHead::run(Context& context, float* embedded, const float* hidden,
                           float* output) const {
  const PassArrays& arrays = context.arrays;
  const int64_t tokens = arrays.tokens, width = context.config.hidden_size;
  const auto normed = [&](const float* x, const Array<float>& weight, const int32_t* rows) {
    const StageTimer timer(context, Stage::kNorm);
    void* y = context.normed.get(tokens * width * context.element_bytes());
    context.backend.add_norm({.hidden = const_cast<float*>(x),
                              .weight = weight.data(),
                              .row_index = rows,
                              .hidden_rows = tokens,
                              .rows = tokens,
                              .dim = width,
                              .eps = context.config.norm_eps,
                              .y = y});
    return y;
  };
  float* from_hidden = context.second_delta.get(tokens * width);
  float* stream = context.hidden.get(tokens * width);
  project(*from_hidden_, normed(hidden, hidden_norm_, arrays.hidden_row), tokens, from_hidden,
          context);
  project(*from_embedding_, normed(embedded, embedding_norm_, nullptr), tokens, stream, context);
  Residual residual(context, stream);
  residual.add(from_hidden, 1 / context.config.residual_scale);
  Places places{.attention = context.config.attention_layers()};
  for (const DecoderLayer& layer : layers_) run_layer(layer, residual, places, context);
  if (arrays.logits == 0) return nullptr;
  return residual.normed_rows(norm_, arrays.logit_tokens, arrays.logits, output);
}

}  // namespace replayssm
