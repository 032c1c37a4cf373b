// Bamba, Falcon-H1 and Granite 4: Mamba-2 and attention layers, or both side by side, each followed
// by a mix over channels.
#include <algorithm>

#include "core/check.h"
#include "model/families/common.h"
#include "model/json_text.h"
#include "replayssm/ops.h"

namespace replayssm {
namespace {

using nlohmann::json;

// --- configuration ------------------------------------------------------------------------------

void read_sizes(const ConfigReader& reader, double default_eps, int64_t default_kv_heads,
                ModelConfig& config) {
  config.vocab_size = reader.integer({"vocab_size"}, kWidthRange);
  config.hidden_size = reader.integer({"hidden_size"}, kWidthRange);
  config.max_positions = reader.integer({"max_position_embeddings"}, kPositionsRange, 0);
  config.norm_eps = read_norm_eps(reader, {"rms_norm_eps"}, default_eps);
  config.tied_embeddings = reader.flag({"tie_word_embeddings"}, false);
  config.activation = MlpActivation::kSwiGlu;
  reader.expect_text({"hidden_act"}, {"silu", "swish"});
  const int64_t heads = reader.integer({"num_attention_heads"}, kCountRange, 32);
  if (!reader.has("head_dim")) {
    check_divides(reader, "hidden_size", config.hidden_size, "num_attention_heads", heads);
  }
  // A key that is there and null means one head each.
  const bool null_kv_heads =
      reader.raw().contains("num_key_value_heads") && !reader.has("num_key_value_heads");
  const int64_t kv_heads = default_kv_heads == 0 || null_kv_heads ? heads : default_kv_heads;
  read_attention(reader, heads, kv_heads, std::max<int64_t>(config.hidden_size / heads, 1),
                 config.attention);
  if (!reader.raw().contains("eos_token_id") && config.vocab_size > 2) config.eos_ids = {2};
  if (!reader.raw().contains("bos_token_id") && config.vocab_size > 1) config.bos_id = 1;
}

// mamba_d_head may be "auto".
int64_t read_head_dim(const ConfigReader& reader, int64_t heads, std::string_view inner_name,
                      int64_t inner) {
  const json* given = reader.find({"mamba_d_head"});
  if (!given || *given == "auto") {
    check_divides(reader, inner_name, inner, "mamba_n_heads", heads);
    return inner / heads;
  }
  const int64_t head_dim = reader.integer({"mamba_d_head"}, kHeadDimRange);
  if (heads * head_dim != inner) {
    reader.refuse("mamba_n_heads",
                  concat("mamba_n_heads * mamba_d_head = ", inner_name, " = ", inner),
                  std::to_string(heads * head_dim));
  }
  return head_dim;
}

// `inner` is the width that `inner_name` gives.
void read_mamba(const ConfigReader& reader, std::string_view inner_name, int64_t inner,
                ModelConfig& config) {
  Mamba2Config& m = config.mamba2;
  m.heads = reader.integer({"mamba_n_heads"}, kCountRange, 128);
  m.head_dim = read_head_dim(reader, m.heads, inner_name, inner);
  m.groups = reader.integer({"mamba_n_groups"}, kCountRange, 1);
  check_divides(reader, "mamba_n_heads", m.heads, "mamba_n_groups", m.groups);
  m.norm_groups = m.groups;
  m.state_dim = reader.integer({"mamba_d_state"}, {1, kMaxStateDim}, 256);
  m.conv_bias = reader.flag({"mamba_conv_bias"}, true);
  m.projection_bias = m.output_bias = reader.flag({"mamba_proj_bias"}, false);
  read_time_step_limit(reader, {"time_step_limit"}, m);
  config.conv_kernel = reader.integer({"mamba_d_conv"}, kKernelRange, 4);
}

int64_t expanded(const ConfigReader& reader, const ModelConfig& config) {
  return reader.integer({"mamba_expand"}, {1, 64}, 2) * config.hidden_size;
}

constexpr std::string_view kExpanded = "mamba_expand * hidden_size";

// The layers by their names, under either of two keys.
std::vector<bool> read_attention_layers(const ConfigReader& reader, int64_t layers,
                                        const LayerChoice& indices = {}) {
  const auto names = [&](std::string_view key) {
    return read_layer_names(reader, key, layers, {"attention", "full_attention"},
                            {"mamba", "linear_attention"});
  };
  const std::vector<bool> chosen =
      merge_choices(reader, {indices, names("layer_types"), names("layers_block_type")});
  return chosen.empty() ? std::vector<bool>(static_cast<size_t>(layers)) : chosen;
}

void set_layers(const std::vector<bool>& attention, ChannelMix mix, ModelConfig& config) {
  for (const bool is_attention : attention) {
    config.layers.push_back({is_attention ? Mixer::kAttention : Mixer::kMamba2, mix});
  }
}

LayerChoice read_indices(const ConfigReader& reader, std::string_view key, int64_t layers) {
  LayerChoice choice{key, {}};
  const json* list = reader.list({key});
  if (!list) return choice;
  choice.layers.resize(static_cast<size_t>(layers));
  for (const json& layer : *list) {
    const bool valid = layer.is_number_unsigned() && layer.get<uint64_t>() < choice.layers.size();
    if (!valid) reader.refuse(key, concat("layers from 0 to ", layers - 1), describe(layer));
    choice.layers[layer.get<size_t>()] = true;
  }
  return choice;
}

void read_bamba(const ConfigReader& reader, ModelConfig& config) {
  read_sizes(reader, 1e-5, 8, config);
  const int64_t layers = reader.integer({"num_hidden_layers"}, kLayersRange, 32);
  const LayerChoice indices = read_indices(reader, "attn_layer_indices", layers);
  set_layers(read_attention_layers(reader, layers, indices), ChannelMix::kDense, config);
  read_mamba(reader, kExpanded, expanded(reader, config), config);
  read_rope(reader, 1e4, 0.5, config.attention);
  const int64_t rotary = config.attention.rotary_dim;
  if (reader.integer({"attn_rotary_emb"}, kHeadDimRange, rotary) != rotary) {
    reader.refuse("attn_rotary_emb", concat("partial_rotary_factor * head_dim = ", rotary),
                  describe(*reader.find({"attn_rotary_emb"})));
  }
  config.intermediate = reader.integer({"intermediate_size"}, kWidthRange, 14336);
  config.mlp_bias = reader.flag({"mlp_bias"}, false);
}

void read_falcon_multipliers(const ConfigReader& reader, ModelConfig& config) {
  config.embedding_scale = read_multiplier(reader, "embedding_multiplier");
  config.logit_scale = read_multiplier(reader, "lm_head_multiplier");
  config.attention.input_scale = read_multiplier(reader, "attention_in_multiplier");
  config.attention.output_scale = read_multiplier(reader, "attention_out_multiplier");
  config.attention.scale *= read_multiplier(reader, "key_multiplier");
  config.mamba2.input_scale = read_multiplier(reader, "ssm_in_multiplier");
  config.mamba2.output_scale = read_multiplier(reader, "ssm_out_multiplier");
  if (const auto scales = read_multipliers(reader, "ssm_multipliers", 5); !scales.empty()) {
    std::ranges::copy(scales, config.mamba2.projection_scale.begin());
  }
  if (const auto scales = read_multipliers(reader, "mlp_multipliers", 2); !scales.empty()) {
    config.mlp_gate_scale = scales[0];
    config.mlp_output_scale = scales[1];
  }
}

void read_falcon_h1(const ConfigReader& reader, ModelConfig& config) {
  read_sizes(reader, 1e-5, 8, config);
  const int64_t layers = reader.integer({"num_hidden_layers"}, kLayersRange, 32);
  for (const char* key : {"layer_types", "layers_block_type"}) {
    read_layer_names(reader, key, layers, {"hybrid"}, {});
  }
  config.layers.assign(static_cast<size_t>(layers),
                       {Mixer::kMamba2, ChannelMix::kDense, Mixer::kAttention});
  // A key that is there and null means the expanded width.
  const int64_t width = expanded(reader, config);
  const bool null_width = reader.raw().contains("mamba_d_ssm") && !reader.has("mamba_d_ssm");
  const int64_t inner = null_width ? width : reader.integer({"mamba_d_ssm"}, kWidthRange, 1024);
  read_mamba(reader, null_width ? kExpanded : "mamba_d_ssm", inner, config);
  Mamba2Config& m = config.mamba2;
  m.output_bias = reader.flag({"projectors_bias"}, false);
  m.gate_first = !reader.flag({"mamba_norm_before_gate"}, true);
  if (!reader.flag({"mamba_rms_norm"}, false)) m.norm_groups = 0;
  const bool has_theta = reader.has("rope_theta") || reader.has("rope_parameters");
  if (!has_theta) reader.refuse("rope_theta", "a number", "nothing");
  read_rope(reader, 1e4, 1, config.attention);
  config.intermediate = reader.integer({"intermediate_size"}, kWidthRange, 14336);
  config.mlp_bias = reader.flag({"mlp_bias"}, false);
  read_falcon_multipliers(reader, config);
}

void read_granite_experts(const ConfigReader& reader, int64_t experts, ModelConfig& config) {
  MoeConfig& moe = config.moe;
  moe.experts = experts;
  moe.top_k = reader.integer({"num_experts_per_tok"}, {1, experts}, 2);
  moe.intermediate = reader.integer({"intermediate_size"}, kWidthRange, 11008);
  moe.shared_intermediate = reader.integer({"shared_intermediate_size"}, kWidthRange, 1024);
  moe.renormalize = true;  // softmax over the chosen logits = renormalised softmax over all
}

void read_granite(const ConfigReader& reader, ModelConfig& config) {
  read_sizes(reader, 1e-6, 0, config);
  const int64_t layers = reader.integer({"num_hidden_layers"}, kLayersRange, 32);
  const int64_t experts = reader.integer({"num_local_experts"}, {0, kCountRange.high}, 8);
  set_layers(read_attention_layers(reader, layers),
             experts > 0 ? ChannelMix::kMoe : ChannelMix::kDense, config);
  if (experts > 0) {
    read_granite_experts(reader, experts, config);
  } else {
    config.intermediate = reader.integer({"shared_intermediate_size"}, kWidthRange, 1024);
  }
  read_mamba(reader, kExpanded, expanded(reader, config), config);
  reader.expect_text({"normalization_function"}, {"rmsnorm"});
  reader.expect_text({"position_embedding_type"}, {"nope", "rope"});
  if (reader.text({"position_embedding_type"}, "nope") == "rope") {
    read_rope(reader, 1e4, 1, config.attention);
  }
  config.attention.scale = read_multiplier(reader, "attention_multiplier");
  config.embedding_scale = read_multiplier(reader, "embedding_multiplier");
  config.residual_scale = read_multiplier(reader, "residual_multiplier");
  config.logit_scale = 1 / read_multiplier(reader, "logits_scaling");
}

// --- tensors ------------------------------------------------------------------------------------

constexpr std::string_view kBodies[] = {"model."};
constexpr std::string_view kEmbeddings[] = {"embed_tokens.weight"};

void read_mixers(WeightReader& reader, const std::string& layer, const LayerConfig& kind,
                 const ModelConfig& config, LayerWeights& w) {
  for (const Mixer mixer : {kind.mixer, kind.second}) {
    if (mixer == Mixer::kMamba2) w.mamba2 = read_mamba2(reader, layer + "mamba.", config);
    if (mixer == Mixer::kAttention) {
      w.attention = read_plain_attention(reader, layer + "self_attn.", config);
    }
  }
}

void read_dense_weights(WeightReader& reader, const ModelConfig& config, ModelWeights& weights) {
  const int64_t hidden = config.hidden_size;
  const Roots roots = find_roots(reader, kBodies, kEmbeddings);
  read_vocabulary(reader, roots, config, weights);
  weights.final_norm = reader.take(roots.body + "final_layernorm.weight", {hidden});
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const std::string layer = concat(roots.body, "layers.", i, ".");
    LayerWeights& w = weights.layers.emplace_back();
    w.mixer_norm = reader.take(layer + "input_layernorm.weight", {hidden});
    w.channel_norm = reader.take(layer + "pre_ff_layernorm.weight", {hidden});
    read_mixers(reader, layer, config.layers[i], config, w);
    w.mlp = read_mlp(reader, layer + "feed_forward.", hidden, config.intermediate, config);
  }
}

// gate and up in one tensor.
MlpWeights read_joined_mlp(WeightReader& reader, const std::string& prefix, int64_t intermediate,
                           int64_t hidden) {
  std::vector<Tensor> in = reader.take_pieces(prefix + "input_linear.weight",
                                              {2 * intermediate, hidden}, {intermediate, hidden});
  MlpWeights w;
  w.gate = std::move(in[0]);
  w.up = std::move(in[1]);
  w.down = reader.take(prefix + "output_linear.weight", {hidden, intermediate});
  return w;
}

MoeWeights read_granite_moe(WeightReader& reader, const std::string& layer,
                            const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  const std::string prefix = layer + "block_sparse_moe.";
  const bool renamed = reader.has(prefix + "router.weight");
  MoeWeights w;
  w.router = reader.take(prefix + (renamed ? "router.weight" : "router.layer.weight"),
                         {moe.experts, config.hidden_size});
  const std::string in = prefix + "input_linear.weight", out = prefix + "output_linear.weight";
  w.experts = reader.has(in) ? read_fused_experts(reader, in, out, config)
                             : read_experts(reader, prefix + "experts.", config);
  w.shared =
      read_joined_mlp(reader, layer + "shared_mlp.", moe.shared_intermediate, config.hidden_size);
  return w;
}

void read_granite_weights(WeightReader& reader, const ModelConfig& config, ModelWeights& weights) {
  const int64_t hidden = config.hidden_size;
  const Roots roots = find_roots(reader, kBodies, kEmbeddings);
  read_vocabulary(reader, roots, config, weights);
  weights.final_norm = reader.take(roots.body + "norm.weight", {hidden});
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const std::string layer = concat(roots.body, "layers.", i, ".");
    LayerWeights& w = weights.layers.emplace_back();
    w.mixer_norm = reader.take(layer + "input_layernorm.weight", {hidden});
    w.channel_norm = reader.take(layer + "post_attention_layernorm.weight", {hidden});
    read_mixers(reader, layer, config.layers[i], config, w);
    if (config.layers[i].channel_mix == ChannelMix::kMoe) {
      w.moe = read_granite_moe(reader, layer, config);
    } else {
      w.mlp = read_joined_mlp(reader, layer + "shared_mlp.", config.intermediate, hidden);
    }
  }
}

constexpr ModelFamily kFamilies[] = {
    {"bamba", "BambaForCausalLM", read_bamba, read_dense_weights},
    {"falcon_h1", "FalconH1ForCausalLM", read_falcon_h1, read_dense_weights},
    {"granitemoehybrid", "GraniteMoeHybridForCausalLM", read_granite, read_granite_weights},
};

}  // namespace

std::span<const ModelFamily> mamba2_hybrid_families() { return kFamilies; }

}  // namespace replayssm
