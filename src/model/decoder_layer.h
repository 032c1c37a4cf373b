// One layer of a model and the residual stream that it adds to.
#pragma once

#include <optional>

#include "model/layers.h"

namespace replayssm {

// The next layer's place among those that keep a state.
struct Places {
  int64_t recurrent = 0, attention = 0;
};

struct DecoderLayer {
  LayerConfig kind;
  // The scales of the mixers' inputs are part of the norms in front of them; the second mixer has a
  // norm of its own where its scale is another.
  Array<float> mixer_norm, second_norm, channel_norm;
  std::optional<Mamba2Layer> mamba2;
  std::optional<GatedDeltaLayer> gated_delta;
  std::optional<KimiDeltaLayer> kimi_delta;
  std::optional<AttentionLayer> attention;
  std::optional<LatentAttentionLayer> latent_attention;
  std::optional<MlpLayer> mlp;
  std::optional<MoeLayer> moe;

  DecoderLayer(const LayerConfig& layer_kind, const LayerWeights& weights, Context& context);
  void mix_tokens(Mixer mixer, const void* x, float* delta, Places& places, Context& context) const;
  int64_t weight_bytes() const;
};

// The residual stream of a pass: what the layers add to it is added by the norm behind them.
class Residual {
 public:
  Residual(Context& context, float* hidden)
      : context_(context), hidden_(hidden), size_(context.config.hidden_size) {}

  // Until the next norm; `second` takes a layer's other output.
  void add(const float* delta, float scale) { delta_ = delta, scale_ = scale; }
  void add_second(const float* delta, float scale) { second_ = delta, second_scale_ = scale; }

  // The stream, normalised and rounded; also in fp32 where `wide` is given.
  const void* normed(const Array<float>& weight, float* wide = nullptr) {
    AddNormParams params = pending(weight, context_.tokens());
    params.y_wide = wide;
    run(params);
    delta_ = second_ = nullptr;
    return params.y;
  }
  // Of the given rows alone.
  const void* normed_rows(const Array<float>& weight, const int32_t* rows, int64_t count,
                          float* wide = nullptr) {
    AddNormParams params = pending(weight, count);
    params.row_index = rows;
    params.hidden_rows = context_.tokens();
    params.y_wide = wide;
    run(params);
    return params.y;
  }

 private:
  AddNormParams pending(const Array<float>& weight, int64_t rows) {
    const float all = context_.config.residual_scale;
    return {.hidden = hidden_,
            .delta = delta_,
            .second = second_,
            .scale = scale_ * all,
            .second_scale = second_scale_ * all,
            .weight = weight.data(),
            .rows = rows,
            .dim = size_,
            .eps = context_.config.norm_eps,
            .y = context_.normed.get(rows * size_ * context_.element_bytes())};
  }
  void run(const AddNormParams& params) { add_norm(params, context_); }

  Context& context_;
  float* hidden_;
  int64_t size_;
  const float *delta_ = nullptr, *second_ = nullptr;
  float scale_ = 1, second_scale_ = 1;
};

// Runs a layer over the pass that the context holds.
void run_layer(const DecoderLayer& layer, Residual& residual, Places& places, Context& context);

}  // namespace replayssm
