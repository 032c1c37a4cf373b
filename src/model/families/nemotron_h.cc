// Nemotron-H: one norm and one mixer or channel mix per layer; attention without rotation.
#include <algorithm>

#include "core/check.h"
#include "model/families/common.h"
#include "model/json_text.h"
#include "replayssm/ops.h"

namespace replayssm {
namespace {

using nlohmann::json;

LayerConfig mixer_layer(Mixer mixer) { return {mixer, ChannelMix::kNone}; }
LayerConfig channel_layer(ChannelMix mix) { return {Mixer::kNone, mix}; }

bool operator==(const LayerConfig& a, const LayerConfig& b) {
  return a.mixer == b.mixer && a.channel_mix == b.channel_mix;
}

// One character per layer.
std::vector<LayerConfig> read_pattern(const ConfigReader& reader, const char* key) {
  std::vector<LayerConfig> layers;
  for (const char c : reader.text({key}, "")) {
    switch (c) {
      case 'M': layers.push_back(mixer_layer(Mixer::kMamba2)); break;
      case '*': layers.push_back(mixer_layer(Mixer::kAttention)); break;
      case '-': layers.push_back(channel_layer(ChannelMix::kDense)); break;
      case 'E': layers.push_back(channel_layer(ChannelMix::kMoe)); break;
      default:
        reader.refuse(key, "only the characters M, *, - and E",
                      concat(in_quotes({&c, 1}), " for layer ", layers.size()));
    }
  }
  return layers;
}

std::vector<LayerConfig> read_block_types(const ConfigReader& reader, const char* key) {
  std::vector<LayerConfig> layers;
  const json* list = reader.list({key});
  if (!list) return layers;
  for (const json& item : *list) {
    const std::string name = item.is_string() ? item.get<std::string>() : "";
    if (name == "mamba" || name == "linear_attention") {
      layers.push_back(mixer_layer(Mixer::kMamba2));
    } else if (name == "attention" || name == "full_attention") {
      layers.push_back(mixer_layer(Mixer::kAttention));
    } else if (name == "mlp") {
      layers.push_back(channel_layer(ChannelMix::kDense));
    } else if (name == "moe") {
      layers.push_back(channel_layer(ChannelMix::kMoe));
    } else {
      reader.refuse(key, "mamba, attention, mlp or moe",
                    concat(describe(item), " for layer ", layers.size()));
    }
  }
  return layers;
}

// The layers by either of two keys, which must agree; empty when neither is there.
std::vector<LayerConfig> read_layers(const ConfigReader& reader, const char* pattern_key,
                                     const char* types_key) {
  std::vector<LayerConfig> pattern = read_pattern(reader, pattern_key);
  std::vector<LayerConfig> types = read_block_types(reader, types_key);
  if (pattern.empty()) return types;
  if (!types.empty() &&
      !std::ranges::equal(pattern, types, [](auto a, auto b) { return a == b; })) {
    fail(reader.file(), ": ", pattern_key, " (", pattern.size(), " layers) and ", types_key, " (",
         types.size(), " layers) disagree");
  }
  return pattern;
}

void read_moe(const ConfigReader& reader, MoeConfig& moe) {
  moe.experts = reader.integer({"n_routed_experts"}, kCountRange, 8);
  moe.top_k = reader.integer({"num_experts_per_tok"}, {1, moe.experts}, 2);
  moe.intermediate = reader.integer({"moe_intermediate_size"}, kWidthRange, 7688);
  moe.latent = reader.integer({"moe_latent_size"}, kWidthRange, 0);
  moe.shared_intermediate =
      reader.integer({"n_shared_experts"}, {0, 64}, 1) *
      reader.integer({"moe_shared_expert_intermediate_size"}, {0, kWidthRange.high}, 7688);
  read_expert_groups(reader, {"n_group"}, "n_routed_experts", "num_experts_per_tok", moe);
  moe.sigmoid_scores = true;
  moe.correction_bias = true;
  moe.renormalize = reader.flag({"norm_topk_prob"}, true);
  moe.scale = static_cast<float>(reader.number({"routed_scaling_factor"}, 1e-6, 1e6, 1));
}

void read_mamba(const ConfigReader& reader, ModelConfig& config) {
  Mamba2Config& m = config.mamba2;
  m.heads = reader.integer({"mamba_num_heads"}, kCountRange, 128);
  m.head_dim = reader.integer({"mamba_head_dim"}, kHeadDimRange, 64);
  m.groups = reader.integer({"n_groups", "mamba_n_groups"}, kCountRange, 8);
  m.norm_groups = m.groups;
  m.state_dim = reader.integer({"ssm_state_size"}, {1, kMaxStateDim}, 128);
  m.conv_bias = reader.flag({"use_conv_bias", "mamba_conv_bias"}, true);
  m.projection_bias = m.output_bias = reader.flag({"use_bias", "mamba_proj_bias"}, false);
  read_time_step_limit(reader, {"time_step_limit", "mamba_dt_limit"}, m);
  check_divides(reader, "mamba_num_heads", m.heads, "n_groups", m.groups);
  config.conv_kernel = reader.integer({"conv_kernel", "mamba_d_conv"}, kKernelRange, 4);
  config.state_dtype = read_state_dtype(reader, {"mamba_ssm_cache_dtype"});
  reader.expect_text({"mamba_hidden_act"}, {"silu", "swish"});
}

// The head's layers; none where it does not draft, or in a way that is not computed here: by
// several blocks, or with states of its own.
std::vector<LayerConfig> read_mtp_layers(const ConfigReader& reader) {
  std::vector<LayerConfig> layers =
      read_layers(reader, "mtp_hybrid_override_pattern", "mtp_layers_block_type");
  if (layers.empty()) layers = {mixer_layer(Mixer::kAttention), channel_layer(ChannelMix::kMoe)};
  const bool drafts = reader.integer({"num_nextn_predict_layers"}, {0, kLayersRange.high}, 0) == 1;
  if (!drafts || std::ranges::count(layers, Mixer::kAttention, &LayerConfig::mixer) != 1 ||
      std::ranges::count(layers, Mixer::kMamba2, &LayerConfig::mixer) > 0)
    return {};
  return layers;
}

void read_config(const ConfigReader& reader, ModelConfig& config) {
  config.layers = read_layers(reader, "hybrid_override_pattern", "layers_block_type");
  const auto layers = static_cast<int64_t>(config.layers.size());
  if (layers == 0) {
    reader.refuse("hybrid_override_pattern", "it or layers_block_type to name the layers",
                  "nothing");
  }
  if (layers > kLayersRange.high) {
    reader.refuse("hybrid_override_pattern", concat("at most ", kLayersRange.high, " layers"),
                  std::to_string(layers));
  }
  if (reader.integer({"num_hidden_layers"}, kLayersRange, layers) != layers) {
    reader.refuse("num_hidden_layers", concat("the ", layers, " layers that are named"),
                  describe(*reader.find({"num_hidden_layers"})));
  }
  config.mtp = read_mtp_layers(reader);

  config.vocab_size = reader.integer({"vocab_size"}, kWidthRange, 131072);
  config.hidden_size = reader.integer({"hidden_size"}, kWidthRange);
  config.max_positions = reader.integer({"max_position_embeddings"}, kPositionsRange, 0);
  config.norm_eps = read_norm_eps(reader, {"layer_norm_epsilon", "rms_norm_eps", "norm_eps"}, 1e-5);
  config.tied_embeddings = reader.flag({"tie_word_embeddings"}, false);
  config.activation = MlpActivation::kReluSquared;
  config.mlp_bias = reader.flag({"mlp_bias"}, false);
  reader.expect_text({"mlp_hidden_act"}, {"relu2"});
  if (reader.has("sliding_window")) {
    reader.refuse("sliding_window", "null", describe(*reader.find({"sliding_window"})));
  }
  read_mamba(reader, config);
  read_attention(reader, 32, 8, 128, config.attention);
  const int64_t intermediate = reader.integer({"intermediate_size"}, kWidthRange, 21504);
  const auto uses = [&](ChannelMix mix) {
    return config.has(mix) || std::ranges::count(config.mtp, mix, &LayerConfig::channel_mix) > 0;
  };
  if (uses(ChannelMix::kDense)) config.intermediate = intermediate;
  if (uses(ChannelMix::kMoe)) read_moe(reader, config.moe);
  if (!reader.raw().contains("eos_token_id") && config.vocab_size > 2) config.eos_ids = {2};
  if (!reader.raw().contains("bos_token_id") && config.vocab_size > 1) config.bos_id = 1;
}

MoeWeights read_moe_weights(WeightReader& reader, const std::string& prefix,
                            const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  const int64_t hidden = config.hidden_size;
  const bool latent = moe.latent > 0;
  MoeWeights w;
  w.router = reader.take(prefix + "gate.weight", {moe.experts, hidden});
  w.correction_bias = reader.take(prefix + "gate.e_score_correction_bias", {moe.experts});
  w.experts = read_experts(reader, prefix + "experts.", config);
  if (moe.shared_intermediate > 0) {
    w.shared =
        read_mlp(reader, prefix + "shared_experts.", hidden, moe.shared_intermediate, config);
  }
  w.latent_in = reader.take_if(latent, prefix + "fc1_latent_proj.weight", {moe.latent, hidden});
  w.latent_out = reader.take_if(latent, prefix + "fc2_latent_proj.weight", {hidden, moe.latent});
  return w;
}

LayerWeights read_layer(WeightReader& reader, const std::string& prefix, const LayerConfig& layer,
                        const ModelConfig& config) {
  const std::string mixer = prefix + "mixer.";
  LayerWeights w;
  Tensor norm = reader.take(prefix + "norm.weight", {config.hidden_size});
  (layer.mixer != Mixer::kNone ? w.mixer_norm : w.channel_norm) = std::move(norm);
  if (layer == mixer_layer(Mixer::kMamba2)) {
    w.mamba2 = read_mamba2(reader, mixer, config);
  } else if (layer == mixer_layer(Mixer::kAttention)) {
    w.attention = read_plain_attention(reader, mixer, config);
  } else if (layer == channel_layer(ChannelMix::kDense)) {
    w.mlp = read_mlp(reader, mixer, config.hidden_size, config.intermediate, config);
  } else {
    w.moe = read_moe_weights(reader, mixer, config);
  }
  return w;
}

// Its first layer has what joins embedding and hidden state, its last one the norm behind all.
MtpWeights read_mtp(WeightReader& reader, const std::string& prefix, const ModelConfig& config) {
  const int64_t hidden = config.hidden_size;
  MtpWeights w;
  w.embedding_norm = reader.take(prefix + "0.enorm.weight", {hidden});
  w.hidden_norm = reader.take(prefix + "0.hnorm.weight", {hidden});
  w.fc = reader.take(prefix + "0.eh_proj.weight", {hidden, 2 * hidden});
  for (size_t i = 0; i < config.mtp.size(); ++i) {
    w.layers.push_back(read_layer(reader, concat(prefix, i, "."), config.mtp[i], config));
  }
  w.norm = reader.take(concat(prefix, config.mtp.size() - 1, ".final_layernorm.weight"), {hidden});
  return w;
}

void read_weights(WeightReader& reader, const ModelConfig& config, ModelWeights& weights) {
  constexpr std::string_view kBodies[] = {"backbone.", "model.backbone.", "model.",
                                          "language_model.backbone.", "language_model.model."};
  constexpr std::string_view kEmbeddings[] = {"embeddings.weight"};
  const Roots roots = find_roots(reader, kBodies, kEmbeddings);
  read_vocabulary(reader, roots, config, weights);
  weights.final_norm = reader.take(roots.body + "norm_f.weight", {config.hidden_size});
  for (size_t i = 0; i < config.layers.size(); ++i) {
    weights.layers.push_back(
        read_layer(reader, concat(roots.body, "layers.", i, "."), config.layers[i], config));
  }
  const std::string mtp = roots.head + "mtp.";
  if (!config.mtp.empty() && reader.may_have(mtp)) {
    weights.mtp.push_back(read_mtp(reader, mtp + "layers.", config));
  } else {
    reader.skip(mtp);
  }
}

constexpr ModelFamily kFamilies[] = {
    {"nemotron_h", "NemotronHForCausalLM", read_config, read_weights},
};

}  // namespace

std::span<const ModelFamily> nemotron_h_families() { return kFamilies; }

}  // namespace replayssm
