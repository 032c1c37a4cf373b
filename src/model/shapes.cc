// What a model keeps per sequence and token.

#include "model/model.h"

namespace replayssm {

RecurrentShape recurrent_shape(const ModelConfig& config) {
  if (config.count(Mixer::kMamba2) > 0) {
    const Mamba2Config& c = config.mamba2;
    return {Family::kMamba2, c.heads, c.groups, c.head_dim, c.state_dim};
  }
  if (config.count(Mixer::kKimiDelta) > 0) {
    const KimiDeltaConfig& c = config.kimi_delta;
    return {Family::kKimiDelta, c.heads, c.heads, c.head_dim, c.head_dim};
  }
  const GatedDeltaConfig& c = config.gated_delta;
  return {Family::kGatedDelta, c.value_heads, c.key_heads, c.value_dim, c.key_dim};
}

KvShape kv_shape(const ModelConfig& config) {
  if (const int64_t layers = config.count(Mixer::kLatentAttention); layers > 0) {
    return {layers, 1, config.latent_attention.cached(), false};
  }
  const AttentionConfig& c = config.attention;
  return {config.count(Mixer::kAttention) + config.draft_attention_layers, c.kv_heads, c.head_dim,
          true};
}

int64_t conv_channels(const ModelConfig& config) {
  return config.count(Mixer::kMamba2) > 0      ? config.mamba2.conv_channels()
         : config.count(Mixer::kKimiDelta) > 0 ? config.kimi_delta.conv_channels()
                                               : config.gated_delta.conv_channels();
}

}  // namespace replayssm
