// Kimi-Linear: Kimi Delta Attention and latent attention without rotation, each followed by a dense
// MLP or a mixture of experts. Two dialects of the configuration: the published one keeps the layer
// lists (from 1 on) in linear_attn_config, that of transformers names every layer.
#include <array>
#include <cmath>

#include "core/check.h"
#include "model/families/common.h"
#include "model/json_text.h"
#include "model/tensor_ops.h"
#include "replayssm/ops.h"

namespace replayssm {
namespace {

using nlohmann::json;

// --- configuration ------------------------------------------------------------------------------

constexpr const char* kLinear = "linear_attn_config";

// A number that one dialect has at the top and the other in linear_attn_config.
int64_t read_either(const ConfigReader& reader, std::string_view flat, std::string_view nested,
                    ConfigReader::Range range, int64_t fallback) {
  const std::optional<ConfigReader> linear = reader.object(kLinear);
  const int64_t value = reader.integer({flat}, range, fallback);
  if (!linear || !linear->has(nested)) return value;
  const int64_t other = linear->integer({nested}, range);
  if (reader.has(flat) && other != value) {
    fail(reader.file(), ": ", kLinear, ".", nested, " (", other, ") and ", flat, " (", value,
         ") disagree");
  }
  return other;
}

// Which layers are full attention by the two lists of linear_attn_config.
LayerChoice read_layer_lists(const ConfigReader& reader, int64_t layers) {
  LayerChoice choice{"linear_attn_config.full_attn_layers", {}};
  const std::optional<ConfigReader> linear = reader.object(kLinear);
  if (!linear || (!linear->has("kda_layers") && !linear->has("full_attn_layers"))) return choice;
  choice.layers.resize(static_cast<size_t>(layers));
  std::vector<bool> named(choice.layers.size());
  for (const char* key : {"kda_layers", "full_attn_layers"}) {
    const json* list = linear->list({key});
    if (!list) linear->refuse(key, "a list", "nothing");
    for (const json& item : *list) {
      const bool valid = item.is_number_unsigned() && item.get<uint64_t>() >= 1 &&
                         item.get<uint64_t>() <= named.size();
      if (!valid) linear->refuse(key, concat("layers from 1 to ", layers), describe(item));
      const size_t layer = item.get<size_t>() - 1;
      if (named[layer]) linear->refuse(key, "every layer once", concat(describe(item), " again"));
      named[layer] = true;
      choice.layers[layer] = key == std::string_view("full_attn_layers");
    }
  }
  for (size_t i = 0; i < named.size(); ++i) {
    if (!named[i])
      linear->refuse("kda_layers", "every layer here or in full_attn_layers",
                     concat("no layer ", i + 1));
  }
  return choice;
}

// Which layers have experts by the first of them and their distance.
LayerChoice read_expert_layers(const ConfigReader& reader, int64_t layers) {
  LayerChoice choice{"first_k_dense_replace", {}};
  if (!reader.has("first_k_dense_replace") && !reader.has("moe_layer_freq")) return choice;
  const int64_t dense = reader.integer({"first_k_dense_replace"}, {0, kLayersRange.high}, 1);
  const int64_t step = reader.integer({"moe_layer_freq"}, kLayersRange, 1);
  for (int64_t i = 0; i < layers; ++i) choice.layers.push_back(i >= dense && i % step == 0);
  return choice;
}

void read_layers(const ConfigReader& reader, ModelConfig& config) {
  const int64_t layers = reader.integer({"num_hidden_layers"}, kLayersRange);
  const std::vector<bool> full = merge_choices(
      reader,
      {read_layer_names(reader, "layer_types", layers, {"full_attention"}, {"linear_attention"}),
       read_layer_lists(reader, layers)});
  if (full.empty()) {
    reader.refuse("layer_types", "it or linear_attn_config to name the layers", "nothing");
  }
  std::vector<bool> sparse = merge_choices(
      reader, {read_layer_names(reader, "mlp_layer_types", layers, {"sparse"}, {"dense"}),
               read_expert_layers(reader, layers)});
  if (sparse.empty()) {
    sparse.assign(full.size(), true);
    sparse[0] = false;
  }
  for (size_t i = 0; i < full.size(); ++i) {
    config.layers.push_back({full[i] ? Mixer::kLatentAttention : Mixer::kKimiDelta,
                             sparse[i] ? ChannelMix::kMoe : ChannelMix::kDense});
  }
}

void read_kimi_delta(const ConfigReader& reader, ModelConfig& config) {
  KimiDeltaConfig& k = config.kimi_delta;
  k.heads = read_either(reader, "linear_num_heads", "num_heads", kCountRange, 32);
  k.head_dim = read_either(reader, "linear_head_dim", "head_dim", {1, kMaxStateDim}, 128);
  config.conv_kernel =
      read_either(reader, "linear_conv_kernel_dim", "short_conv_kernel_size", kKernelRange, 4);
  if (const std::optional<ConfigReader> linear = reader.object(kLinear)) {
    k.gate_lower_bound = static_cast<float>(linear->number({"gate_lower_bound"}, -1e3, -1e-3, 0));
  }
}

void read_latent_attention(const ConfigReader& reader, ModelConfig& config) {
  LatentAttentionConfig& a = config.latent_attention;
  a.heads = reader.integer({"num_attention_heads"}, kCountRange, 32);
  if (reader.integer({"num_key_value_heads"}, kCountRange, a.heads) != a.heads) {
    reader.refuse("num_key_value_heads", concat("num_attention_heads = ", a.heads),
                  describe(*reader.find({"num_key_value_heads"})));
  }
  a.latent = reader.integer({"kv_lora_rank"}, kHeadDimRange, 512);
  a.key_dim = reader.integer({"qk_nope_head_dim"}, kHeadDimRange, 128);
  a.shared_dim = reader.integer({"qk_rope_head_dim"}, kHeadDimRange, 64);
  a.value_dim = reader.integer({"v_head_dim"}, kHeadDimRange, 128);
  a.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(a.query_dim())));
  a.norm_eps = 1e-6f;  // this norm has no key of its own
  if (reader.integer({"qk_head_dim"}, kWidthRange, a.query_dim()) != a.query_dim()) {
    reader.refuse("qk_head_dim", concat("qk_nope_head_dim + qk_rope_head_dim = ", a.query_dim()),
                  describe(*reader.find({"qk_head_dim"})));
  }
  if (reader.has("q_lora_rank")) {
    reader.refuse("q_lora_rank", "null", describe(*reader.find({"q_lora_rank"})));
  }
  if (!reader.flag({"mla_use_nope"}, true)) reader.refuse("mla_use_nope", "true", "false");
  if (reader.flag({"attention_bias"}, false)) reader.refuse("attention_bias", "false", "true");
}

void read_moe(const ConfigReader& reader, MoeConfig& moe) {
  moe.experts = reader.integer({"num_experts", "num_local_experts"}, kCountRange, 256);
  moe.top_k = reader.integer({"num_experts_per_token", "num_experts_per_tok"}, {1, moe.experts}, 8);
  moe.intermediate = reader.integer({"moe_intermediate_size"}, kWidthRange, 1024);
  moe.shared_intermediate =
      reader.integer({"num_shared_experts", "n_shared_experts"}, {0, 64}, 1) * moe.intermediate;
  reader.expect_text({"moe_router_activation_func"}, {"sigmoid"});
  moe.sigmoid_scores = true;
  moe.correction_bias = true;
  moe.renormalize = reader.flag({"moe_renormalize", "norm_topk_prob"}, true);
  if (!reader.has("routed_scaling_factor")) {
    reader.refuse("routed_scaling_factor", "a number", "nothing");
  }
  moe.scale = static_cast<float>(reader.number({"routed_scaling_factor"}, 1e-6, 1e6, 1));
  read_expert_groups(reader, {"num_expert_group", "n_group"}, "num_experts",
                     "num_experts_per_token", moe);
  if (!reader.flag({"use_grouped_topk"}, true)) moe.groups = moe.top_groups = 1;
}

void read_config(const ConfigReader& reader, ModelConfig& config) {
  config.vocab_size = reader.integer({"vocab_size"}, kWidthRange, 163840);
  config.hidden_size = reader.integer({"hidden_size"}, kWidthRange);
  config.max_positions =
      reader.integer({"model_max_length", "max_position_embeddings"}, kPositionsRange, 0);
  config.norm_eps = read_norm_eps(reader, {"rms_norm_eps"}, 1e-5);
  config.tied_embeddings = reader.flag({"tie_word_embeddings"}, false);
  config.activation = MlpActivation::kSwiGlu;
  reader.expect_text({"hidden_act"}, {"silu", "swish"});
  read_layers(reader, config);
  read_kimi_delta(reader, config);
  read_latent_attention(reader, config);
  const int64_t intermediate = reader.integer({"intermediate_size"}, kWidthRange, 9216);
  if (config.has(ChannelMix::kDense)) config.intermediate = intermediate;
  if (config.has(ChannelMix::kMoe)) read_moe(reader, config.moe);
  if (reader.integer({"num_nextn_predict_layers"}, {0, 64}, 0) != 0) {
    reader.refuse("num_nextn_predict_layers", "0",
                  describe(*reader.find({"num_nextn_predict_layers"})));
  }
}

// --- tensors ------------------------------------------------------------------------------------

KimiDeltaWeights read_kimi_delta_weights(WeightReader& reader, const std::string& prefix,
                                         const ModelConfig& config) {
  const KimiDeltaConfig& k = config.kimi_delta;
  const int64_t hidden = config.hidden_size, inner = k.inner(), rank = k.head_dim;
  const auto filter = [&](const char* name) {
    return reader.take_filter(concat(prefix, name, ".weight"), inner, config.conv_kernel);
  };
  KimiDeltaWeights w;
  w.q = reader.take(prefix + "q_proj.weight", {inner, hidden});
  w.k = reader.take(prefix + "k_proj.weight", {inner, hidden});
  w.v = reader.take(prefix + "v_proj.weight", {inner, hidden});
  w.beta = reader.take(prefix + "b_proj.weight", {k.heads, hidden});
  w.decay_down = reader.take(prefix + "f_a_proj.weight", {rank, hidden});
  w.decay_up = reader.take(prefix + "f_b_proj.weight", {inner, rank});
  w.gate_down = reader.take(prefix + "g_a_proj.weight", {rank, hidden});
  w.gate_up = reader.take(prefix + "g_b_proj.weight", {inner, rank});
  w.q_conv = filter("q_conv1d");
  w.k_conv = filter("k_conv1d");
  w.v_conv = filter("v_conv1d");
  w.dt_bias = reader.take_vector(prefix + "dt_bias", inner);
  w.a_log = reader.take_vector(prefix + "A_log", k.heads);
  w.norm = reader.take(prefix + "o_norm.weight", {k.head_dim});
  w.out_proj = reader.take(prefix + "o_proj.weight", {hidden, inner});
  return w;
}

LatentAttentionWeights read_latent_weights(WeightReader& reader, const std::string& prefix,
                                           const ModelConfig& config) {
  const LatentAttentionConfig& a = config.latent_attention;
  const int64_t hidden = config.hidden_size, both = a.key_dim + a.value_dim;
  LatentAttentionWeights w;
  w.q = reader.take(prefix + "q_proj.weight", {a.heads * a.query_dim(), hidden});
  w.latent = reader.take(prefix + "kv_a_proj_with_mqa.weight", {a.cached(), hidden});
  w.norm = reader.take(prefix + "kv_a_layernorm.weight", {a.latent});
  const Tensor up = reader.take(prefix + "kv_b_proj.weight", {a.heads * both, a.latent});
  std::vector<RowRange> keys, values;
  for (int64_t h = 0; h < a.heads; ++h) {
    keys.push_back({h * both, a.key_dim});
    values.push_back({h * both + a.key_dim, a.value_dim});
  }
  w.key_up = gather_rows(up, keys);
  w.value_up = gather_rows(up, values);
  w.o = reader.take(prefix + "o_proj.weight", {hidden, a.heads * a.value_dim});
  return w;
}

MoeWeights read_moe_weights(WeightReader& reader, const std::string& prefix,
                            const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  const int64_t hidden = config.hidden_size;
  MoeWeights w;
  w.router = reader.take(prefix + "gate.weight", {moe.experts, hidden});
  w.correction_bias = reader.take(prefix + "gate.e_score_correction_bias", {moe.experts});
  const bool numbered = reader.has(prefix + "experts.0.w1.weight");
  const MlpNames names = numbered ? MlpNames{"w1", "w3", "w2"} : MlpNames{};
  w.experts = read_experts(reader, prefix + "experts.", config, names);
  if (moe.shared_intermediate > 0) {
    w.shared =
        read_mlp(reader, prefix + "shared_experts.", hidden, moe.shared_intermediate, config);
  }
  return w;
}

LayerWeights read_layer(WeightReader& reader, const std::string& layer, const LayerConfig& kind,
                        const ModelConfig& config) {
  const int64_t hidden = config.hidden_size;
  LayerWeights w;
  w.mixer_norm = reader.take(layer + "input_layernorm.weight", {hidden});
  w.channel_norm = reader.take(layer + "post_attention_layernorm.weight", {hidden});
  if (kind.mixer == Mixer::kKimiDelta) {
    w.kimi_delta = read_kimi_delta_weights(reader, layer + "self_attn.", config);
  } else {
    w.latent_attention = read_latent_weights(reader, layer + "self_attn.", config);
  }
  // Re-saved checkpoints give dense layers and experts the same prefix.
  const bool moe = kind.channel_mix == ChannelMix::kMoe;
  const bool sparse_name = reader.has(layer + "block_sparse_moe.down_proj.weight") ||
                           reader.has(layer + "block_sparse_moe.gate.weight");
  const std::string mix = layer + (sparse_name ? "block_sparse_moe." : "mlp.");
  if (moe) {
    w.moe = read_moe_weights(reader, mix, config);
  } else {
    w.mlp = read_mlp(reader, mix, hidden, config.intermediate, config);
  }
  return w;
}

void read_weights(WeightReader& reader, const ModelConfig& config, ModelWeights& weights) {
  constexpr std::string_view kBodies[] = {"model."};
  constexpr std::string_view kEmbeddings[] = {"embed_tokens.weight"};
  const Roots roots = find_roots(reader, kBodies, kEmbeddings);
  read_vocabulary(reader, roots, config, weights);
  weights.final_norm = reader.take(roots.body + "norm.weight", {config.hidden_size});
  for (size_t i = 0; i < config.layers.size(); ++i) {
    weights.layers.push_back(
        read_layer(reader, concat(roots.body, "layers.", i, "."), config.layers[i], config));
  }
}

constexpr ModelFamily kFamilies[] = {
    {"kimi_linear", "KimiLinearForCausalLM", read_config, read_weights},
};

}  // namespace

std::span<const ModelFamily> kimi_families() { return kFamilies; }

}  // namespace replayssm
