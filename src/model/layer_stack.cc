// The forward pass.

#include "model/layer_stack.h"

#include <optional>
#include <utility>

#include "core/check.h"
#include "model/sharding.h"

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

// The next layer's place among those that keep a state.
struct Places {
  int64_t recurrent = 0, attention = 0;
};

}  // namespace

struct LayerStack::Layer {
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
        mixer_norm(
            pack_floats(weights.mixer_norm, context, input_scale(context.config, kind.mixer))),
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

namespace {

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
  const void* normed_rows(const Array<float>& weight, const int32_t* rows, int64_t count) {
    AddNormParams params = pending(weight, count);
    params.row_index = rows;
    params.hidden_rows = context_.tokens();
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

void mix_tokens(const LayerStack::Layer& layer, Residual& residual, Places& places,
                Context& context) {
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

void mix_channels(const LayerStack::Layer& layer, Residual& residual, Context& context) {
  const int64_t count = context.tokens() * context.config.hidden_size;
  float* wide = layer.moe ? context.normed_wide.get(count) : nullptr;
  const void* x = residual.normed(layer.channel_norm, wide);
  float* delta = context.delta.get(count);
  if (layer.mlp) layer.mlp->forward(x, context.tokens(), delta, true, context);
  if (layer.moe) layer.moe->forward(x, wide, delta, context);
  residual.add(delta, output_scale(context.config, layer.kind.channel_mix));
}

// The embedding in the activation dtype, in the backend's memory.
Buffer pack_embedding(const Tensor& tensor, Context& context) {
  Buffer packed(tensor.elements() * context.element_bytes(), context.memory);
  write_tensor(tensor, context.dtype(), packed.as<>(), context.memory);
  return packed;
}

}  // namespace

LayerStack::LayerStack(ModelWeights weights, Context& context,
                       const std::function<void(int64_t, int64_t)>& progress) {
  const ModelConfig& config = context.config;
  const auto total = static_cast<int64_t>(config.layers.size());
  for (int64_t i = 0; i < total; ++i) {
    const LayerWeights layer = std::move(weights.layers[static_cast<size_t>(i)]);
    layers_.emplace_back(config.layers[static_cast<size_t>(i)], layer, context);
    if (progress) progress(i + 1, total);
  }
  weights.layers.clear();
  weights.mtp.clear();
  final_norm_ = pack_floats(weights.final_norm, context, config.logit_scale);
  const Tensor& head = weights.lm_head ? weights.lm_head : weights.embedding;
  lm_head_ = pack_product({&head}, config.hidden_size, context);
  weights.lm_head = {};
  embedding_ = pack_embedding(weights.embedding, context);
}

LayerStack::~LayerStack() = default;

int64_t LayerStack::weight_bytes() const {
  int64_t bytes = embedding_.bytes() + lm_head_->weight_bytes();
  for (const Layer& layer : layers_) bytes += layer.weight_bytes();
  return bytes;
}

void LayerStack::run(Context& context, float* logits) const {
  const PassArrays& arrays = context.arrays;
  const ModelConfig& config = context.config;
  context.pending = {};
  context.backend.begin_pass(arrays, *context.state);
  float* hidden = context.hidden.get(arrays.tokens * config.hidden_size);
  {
    const StageTimer timer(context, Stage::kEmbed);
    context.backend.embed(embedding_.as<>(), arrays.token_ids, arrays.tokens, config.hidden_size,
                          config.embedding_scale, hidden);
  }
  Residual residual(context, hidden);
  Places places;
  for (const Layer& layer : layers_) {
    if (layer.mixer_norm.size()) mix_tokens(layer, residual, places, context);
    if (layer.channel_norm.size()) mix_channels(layer, residual, context);
  }
  if (arrays.logits == 0) return;
  const void* x = residual.normed_rows(final_norm_, arrays.logit_tokens, arrays.logits);
  project(*lm_head_, x, arrays.logits, logits, context);
}

ModelWeights read_weights(const ModelSource& source, ModelConfig& config) {
  ModelWeights weights =
      source.dummy_weights ? dummy_weights(config) : load_weights(source.folder, config);
  if (source.communicator) take_shard(config, weights, source.communicator->shard());
  return weights;
}

void check_pass(const Batch& batch, const StateView& state, const ModelConfig& config,
                int64_t drawn) {
  const int64_t sequences = batch.sequences();
  REPLAYSSM_CHECK(static_cast<int64_t>(batch.query_start.size()) == sequences + 1 &&
                      static_cast<int64_t>(batch.position.size()) == sequences,
                  "sequences=", sequences);
  REPLAYSSM_CHECK(batch.decodes >= 0 && batch.decodes <= sequences, "decodes=", batch.decodes);
  REPLAYSSM_CHECK(batch.query_start.back() == static_cast<int64_t>(batch.token_ids.size()),
                  "query_start ends at ", batch.query_start.back());
  REPLAYSSM_CHECK(static_cast<int64_t>(state.recurrent.size()) == config.recurrent_layers(),
                  "states=", state.recurrent.size());
  REPLAYSSM_CHECK(static_cast<int64_t>(state.kv_keys.size()) == config.attention_layers(),
                  "kv layers=", state.kv_keys.size());
  for (const int32_t id : batch.token_ids) {
    if (id <= -2 && -2 - id < drawn) continue;
    if (id < 0 || id >= config.vocab_size)
      fail("token id ", id, " is outside the model's vocabulary of ", config.vocab_size);
  }
}

}  // namespace replayssm
