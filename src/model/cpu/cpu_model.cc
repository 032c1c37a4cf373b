// The forward pass on the CPU.

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/check.h"
#include "model/cpu/layers.h"
#include "ops/cpu/dense.h"

namespace replayssm {
namespace cpu {
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

// The next layer's place among those that keep a state.
struct Places {
  int64_t recurrent = 0, attention = 0;
};

struct Layer {
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

  Layer(const LayerConfig& layer_kind, const LayerWeights& weights, Context& context)
      : kind(layer_kind),
        mixer_norm(pack_floats(weights.mixer_norm, input_scale(context.config, kind.mixer))),
        channel_norm(pack_floats(weights.channel_norm)) {
    const ModelConfig& config = context.config;
    if (input_scale(config, kind.second) != input_scale(config, kind.mixer)) {
      second_norm = pack_floats(weights.mixer_norm, input_scale(config, kind.second));
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

  void mix_tokens(Mixer mixer, const void* x, float* delta, Places& places,
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

  int64_t weight_bytes() const {
    const auto bytes = [](const auto& layer) { return layer ? layer->weight_bytes() : 0; };
    return bytes(mamba2) + bytes(gated_delta) + bytes(kimi_delta) + bytes(attention) +
           bytes(latent_attention) + bytes(mlp) + bytes(moe);
  }
};

class CpuModel final : public Model {
 public:
  CpuModel(ModelConfig config, ModelWeights weights, DType dtype, ThreadPool& pool,
           const std::function<void(int64_t, int64_t)>& progress)
      : config_(std::move(config)), context_(config_, dtype, pool) {
    const auto total = static_cast<int64_t>(config_.layers.size());
    for (int64_t i = 0; i < total; ++i) {
      LayerWeights layer = std::move(weights.layers[static_cast<size_t>(i)]);
      layers_.emplace_back(config_.layers[static_cast<size_t>(i)], layer, context_);
      if (progress) progress(i + 1, total);
    }
    weights.layers.clear();
    weights.mtp.clear();
    final_norm_ = pack_floats(weights.final_norm, config_.logit_scale);
    const Tensor& head = weights.lm_head ? weights.lm_head : weights.embedding;
    lm_head_ = pack_linear({&head}, config_.hidden_size, context_);
    weights.lm_head = {};
    pack_embedding(weights.embedding);
  }

  const ModelConfig& config() const override { return config_; }
  DType activation_dtype() const override { return context_.dtype; }
  StageTimes& stage_times() override { return context_.times; }

  int64_t weight_bytes() const override {
    int64_t bytes = embedding_.bytes() + lm_head_.weight_bytes();
    for (const Layer& layer : layers_) bytes += layer.weight_bytes();
    return bytes;
  }

  void forward(const Batch& batch, const StateView& state, float* logits) override {
    check(batch, state);
    const auto tokens = static_cast<int64_t>(batch.token_ids.size());
    if (tokens == 0) return;
    context_.batch = &batch;
    context_.state = &state;
    context_.tokens = tokens;
    set_positions(batch);
    const int64_t hidden_size = config_.hidden_size;
    float* hidden = context_.hidden.get(tokens * hidden_size);
    {
      const StageTimer timer(context_.times.embed);
      embed(embedding_.as<>(), context_.dtype, batch.token_ids.data(), tokens, hidden_size,
            config_.embedding_scale, hidden, context_.pool);
    }
    Places places;
    for (const Layer& layer : layers_) {
      if (layer.mixer_norm.size()) mix_tokens(layer, tokens, hidden, places);
      if (layer.channel_norm.size()) mix_channels(layer, tokens, hidden);
    }
    write_logits(batch.logit_tokens, hidden, logits);
  }

 private:
  void check(const Batch& batch, const StateView& state) const {
    const int64_t sequences = batch.sequences();
    REPLAYSSM_CHECK(static_cast<int64_t>(batch.query_start.size()) == sequences + 1 &&
                        static_cast<int64_t>(batch.position.size()) == sequences,
                    "sequences=", sequences);
    REPLAYSSM_CHECK(batch.decodes >= 0 && batch.decodes <= sequences, "decodes=", batch.decodes);
    REPLAYSSM_CHECK(batch.query_start.back() == static_cast<int64_t>(batch.token_ids.size()),
                    "query_start ends at ", batch.query_start.back());
    REPLAYSSM_CHECK(static_cast<int64_t>(state.recurrent.size()) == config_.recurrent_layers(),
                    "states=", state.recurrent.size());
    REPLAYSSM_CHECK(static_cast<int64_t>(state.kv_keys.size()) == config_.attention_layers(),
                    "kv layers=", state.kv_keys.size());
    for (const int32_t id : batch.token_ids) {
      if (id < 0 || id >= config_.vocab_size)
        fail("token id ", id, " is outside the model's vocabulary of ", config_.vocab_size);
    }
  }

  void set_positions(const Batch& batch) {
    context_.token_position.resize(batch.token_ids.size());
    for (int64_t s = 0; s < batch.sequences(); ++s) {
      for (int64_t t = batch.query_start[s]; t < batch.query_start[s + 1]; ++t)
        context_.token_position[t] = batch.position[s] + t - batch.query_start[s];
    }
  }

  const void* normed(const float* hidden, const Array<float>& weight, int64_t rows) {
    const StageTimer timer(context_.times.norm);
    std::byte* y = context_.normed.get(rows * config_.hidden_size * context_.element_bytes());
    rms_norm(hidden, weight.data(), rows, config_.hidden_size, config_.norm_eps, y, context_.dtype,
             context_.pool);
    return y;
  }

  const float* normed_wide(const float* hidden, const Array<float>& weight, int64_t rows) {
    const StageTimer timer(context_.times.norm);
    float* y = context_.normed_wide.get(rows * config_.hidden_size);
    rms_norm(hidden, weight.data(), rows, config_.hidden_size, config_.norm_eps, y, DType::kFloat32,
             context_.pool);
    return y;
  }

  void mix_tokens(const Layer& layer, int64_t tokens, float* hidden, Places& places) {
    float* delta = context_.delta.get(tokens * config_.hidden_size);
    const void* x = normed(hidden, layer.mixer_norm, tokens);
    layer.mix_tokens(layer.kind.mixer, x, delta, places, context_);
    if (const Mixer second = layer.kind.second; second != Mixer::kNone) {
      float* second_delta = context_.second_delta.get(tokens * config_.hidden_size);
      if (layer.second_norm.size()) x = normed(hidden, layer.second_norm, tokens);
      layer.mix_tokens(second, x, second_delta, places, context_);
      add_residual(second_delta, output_scale(config_, second), tokens, hidden);
    }
    add_residual(delta, output_scale(config_, layer.kind.mixer), tokens, hidden);
  }

  void mix_channels(const Layer& layer, int64_t tokens, float* hidden) {
    float* delta = context_.delta.get(tokens * config_.hidden_size);
    const void* x = normed(hidden, layer.channel_norm, tokens);
    if (layer.mlp) layer.mlp->forward(x, tokens, delta, context_);
    if (layer.moe)
      layer.moe->forward(x, normed_wide(hidden, layer.channel_norm, tokens), delta, context_);
    add_residual(delta, output_scale(config_, layer.kind.channel_mix), tokens, hidden);
  }

  void add_residual(const float* delta, float scale, int64_t tokens, float* hidden) {
    const StageTimer timer(context_.times.norm);
    add_scaled(delta, scale * config_.residual_scale, tokens * config_.hidden_size, hidden,
               context_.pool);
  }

  void write_logits(std::span<const int32_t> rows, float* hidden, float* logits) {
    const auto count = static_cast<int64_t>(rows.size());
    if (count == 0) return;
    const int64_t size = config_.hidden_size;
    float* chosen = context_.delta.get(count * size);
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(hidden + rows[i] * size, size, chosen + i * size);
    const void* x = normed(chosen, final_norm_, count);
    const StageTimer timer(context_.times.matmul);
    lm_head_.apply(x, size, count, logits, config_.vocab_size, context_.pool);
  }

  void pack_embedding(const Tensor& tensor) {
    embedding_ = Buffer(tensor.elements() * context_.element_bytes());
    if (tensor.dtype == context_.dtype) {
      std::memcpy(embedding_.as<>(), tensor.data, static_cast<size_t>(embedding_.bytes()));
      return;
    }
    const auto values = tensor.to_floats();
    convert_rows(values.data(), config_.hidden_size, config_.vocab_size, config_.hidden_size,
                 embedding_.as<>(), context_.dtype, context_.pool);
  }

  ModelConfig config_;
  Context context_;
  std::vector<Layer> layers_;
  Array<float> final_norm_;
  Linear lm_head_;
  Buffer embedding_;
};

}  // namespace
}  // namespace cpu

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
  return {config.count(Mixer::kAttention), c.kv_heads, c.head_dim, true};
}

int64_t conv_channels(const ModelConfig& config) {
  return config.count(Mixer::kMamba2) > 0      ? config.mamba2.conv_channels()
         : config.count(Mixer::kKimiDelta) > 0 ? config.kimi_delta.conv_channels()
                                               : config.gated_delta.conv_channels();
}

std::unique_ptr<Model> load_cpu_model(const std::filesystem::path& folder, DType activation_dtype,
                                      ThreadPool& pool,
                                      const std::function<void(int64_t, int64_t)>& progress) {
  REPLAYSSM_CHECK(activation_dtype != DType::kFloat16, "no float16 matrix products on the CPU");
  ModelConfig config = load_config(folder);
  ModelWeights weights = load_weights(folder, config);
  return std::make_unique<cpu::CpuModel>(std::move(config), std::move(weights), activation_dtype,
                                         pool, progress);
}

}  // namespace replayssm
