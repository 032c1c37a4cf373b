#include "model/decoder_layer.h"

namespace replayssm {
namespace {

float input_scale(const ModelConfig& config, Mixer mixer) {
  return mixer == Mixer::kMamba2      ? config.mamba2.input_scale
         : mixer == Mixer::kAttention ? config.attention.input_scale
                                      : 1;
}

float output_scale(const ModelConfig& config, Mixer mixer) {
  return mixer == Mixer::kMamba2      ? config.mamba2.output_scale
         : mixer == Mixer::kAttention ? config.attention.output_scale
                                      : 1;
}

float output_scale(const ModelConfig& config, ChannelMix mix) {
  return mix == ChannelMix::kDense ? config.mlp_output_scale : 1;
}

void mix_tokens(const DecoderLayer& layer, Residual& residual, Places& places, Context& context) {
  const int64_t count = context.tokens() * context.config.hidden_size;
  const void* x = residual.normed(layer.mixer_norm);
  float* delta = context.delta.get(count);
  layer.mix_tokens(layer.kind.mixer, x, delta, places, context);
  if (const Mixer second = layer.kind.second; second != Mixer::kNone) {
    float* second_delta = context.second_delta.get(count);
    if (layer.second_norm.size()) x = residual.normed(layer.second_norm);
    layer.mix_tokens(second, x, second_delta, places, context);
    residual.add_second(second_delta, output_scale(context.config, second));
  }
  residual.add(delta, output_scale(context.config, layer.kind.mixer));
}

void mix_channels(const DecoderLayer& layer, Residual& residual, Context& context) {
  const int64_t count = context.tokens() * context.config.hidden_size;
  float* wide = layer.moe ? context.normed_wide.get(count) : nullptr;
  const void* x = residual.normed(layer.channel_norm, wide);
  float* delta = context.delta.get(count);
  if (layer.mlp) layer.mlp->forward(x, context.tokens(), delta, true, context);
  if (layer.moe) layer.moe->forward(x, wide, delta, context);
  residual.add(delta, output_scale(context.config, layer.kind.channel_mix));
}

}  // namespace

DecoderLayer::DecoderLayer(const LayerConfig& layer_kind, const LayerWeights& weights,
                           Context& context)
    : kind(layer_kind),
      mixer_norm(pack_floats(weights.mixer_norm, context, input_scale(context.config, kind.mixer))),
      channel_norm(pack_floats(weights.channel_norm, context)) {
  const ModelConfig& config = context.config;
  if (input_scale(config, kind.second) != input_scale(config, kind.mixer)) {
    second_norm = pack_floats(weights.mixer_norm, context, input_scale(config, kind.second));
  }
  for (const Mixer mixer : {kind.mixer, kind.second}) {
    switch (mixer) {
      case Mixer::kNone: break;
      case Mixer::kMamba2: mamba2.emplace(weights.mamba2, context); break;
      case Mixer::kGatedDelta: gated_delta.emplace(weights.gated_delta, context); break;
      case Mixer::kKimiDelta: kimi_delta.emplace(weights.kimi_delta, context); break;
      case Mixer::kAttention: attention.emplace(weights.attention, context); break;
      case Mixer::kLatentAttention:
        latent_attention.emplace(weights.latent_attention, context);
        break;
    }
  }
  switch (kind.channel_mix) {
    case ChannelMix::kNone: break;
    case ChannelMix::kDense:
      mlp.emplace(weights.mlp, config.hidden_size, context, config.mlp_gate_scale);
      break;
    case ChannelMix::kMoe: moe.emplace(weights.moe, context); break;
  }
}

void DecoderLayer::mix_tokens(Mixer mixer, const void* x, float* delta, Places& places,
                              Context& context) const {
  switch (mixer) {
    case Mixer::kNone: break;
    case Mixer::kMamba2: return mamba2->forward(places.recurrent++, x, delta, context);
    case Mixer::kGatedDelta: return gated_delta->forward(places.recurrent++, x, delta, context);
    case Mixer::kKimiDelta: return kimi_delta->forward(places.recurrent++, x, delta, context);
    case Mixer::kAttention: return attention->forward(places.attention++, x, delta, context);
    case Mixer::kLatentAttention:
      return latent_attention->forward(places.attention++, x, delta, context);
  }
}

int64_t DecoderLayer::weight_bytes() const {
  const auto bytes = [](const auto& layer) { return layer ? layer->weight_bytes() : 0; };
  return bytes(mamba2) + bytes(gated_delta) + bytes(kimi_delta) + bytes(attention) +
         bytes(latent_attention) + bytes(mlp) + bytes(moe);
}

void run_layer(const DecoderLayer& layer, Residual& residual, Places& places, Context& context) {
  if (layer.mixer_norm.size()) mix_tokens(layer, residual, places, context);
  if (layer.channel_norm.size()) mix_channels(layer, residual, context);
}

}  // namespace replayssm
