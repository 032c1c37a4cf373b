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

struct Layer {
  Array<float> mixer_norm, channel_norm;
  std::optional<Mamba2Layer> mamba2;
  std::optional<GatedDeltaLayer> gated_delta;
  std::optional<AttentionLayer> attention;
  std::optional<MlpLayer> mlp;
  std::optional<MoeLayer> moe;

  Layer(const LayerConfig& kind, const LayerWeights& weights, Context& context)
      : mixer_norm(pack_floats(weights.mixer_norm)),
        channel_norm(pack_floats(weights.channel_norm)) {
    switch (kind.mixer) {
      case Mixer::kNone: break;
      case Mixer::kMamba2: mamba2.emplace(weights.mamba2, context); break;
      case Mixer::kGatedDelta: gated_delta.emplace(weights.gated_delta, context); break;
      case Mixer::kAttention: attention.emplace(weights.attention, context); break;
    }
    switch (kind.channel_mix) {
      case ChannelMix::kNone: break;
      case ChannelMix::kDense: mlp.emplace(weights.mlp, context.config.hidden_size, context); break;
      case ChannelMix::kMoe: moe.emplace(weights.moe, context); break;
    }
  }

  int64_t weight_bytes() const {
    const auto bytes = [](const auto& layer) { return layer ? layer->weight_bytes() : 0; };
    return bytes(mamba2) + bytes(gated_delta) + bytes(attention) + bytes(mlp) + bytes(moe);
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
    final_norm_ = pack_floats(weights.final_norm);
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
      embed(embedding_.as<>(), context_.dtype, batch.token_ids.data(), tokens, hidden_size, 1.0f,
            hidden, context_.pool);
    }
    float* delta = context_.delta.get(tokens * hidden_size);
    int64_t recurrent = 0, attention = 0;
    for (const Layer& layer : layers_) {
      if (layer.mixer_norm.size()) {
        const void* x = normed(hidden, layer.mixer_norm, tokens);
        if (layer.mamba2) layer.mamba2->forward(recurrent++, x, delta, context_);
        if (layer.gated_delta) layer.gated_delta->forward(recurrent++, x, delta, context_);
        if (layer.attention) layer.attention->forward(attention++, x, delta, context_);
        add_residual(delta, tokens, hidden);
      }
      if (layer.channel_norm.size()) {
        const void* x = normed(hidden, layer.channel_norm, tokens);
        if (layer.mlp) layer.mlp->forward(x, tokens, delta, context_);
        if (layer.moe)
          layer.moe->forward(x, normed_wide(hidden, layer.channel_norm, tokens), delta, context_);
        add_residual(delta, tokens, hidden);
      }
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
    REPLAYSSM_CHECK(static_cast<int64_t>(state.recurrent.size()) ==
                        config_.count(Mixer::kMamba2) + config_.count(Mixer::kGatedDelta),
                    "states=", state.recurrent.size());
    REPLAYSSM_CHECK(static_cast<int64_t>(state.kv_keys.size()) == config_.count(Mixer::kAttention),
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

  void add_residual(const float* delta, int64_t tokens, float* hidden) {
    const StageTimer timer(context_.times.norm);
    add_scaled(delta, 1.0f, tokens * config_.hidden_size, hidden, context_.pool);
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
  const GatedDeltaConfig& c = config.gated_delta;
  return {Family::kGatedDelta, c.value_heads, c.key_heads, c.value_dim, c.key_dim};
}

int64_t conv_channels(const ModelConfig& config) {
  return config.count(Mixer::kMamba2) > 0 ? config.mamba2.conv_channels()
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
