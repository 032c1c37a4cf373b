// Qwen3-Next and Qwen3.5: Gated DeltaNet and gated attention, each followed by a dense MLP or a
// mixture of experts.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "model/families/common.h"
#include "model/json_text.h"
#include "model/tensor_ops.h"
#include "replayssm/ops.h"

namespace replayssm {
namespace {

using nlohmann::json;

bool is_next(const ModelConfig& config) { return config.model_type == "qwen3_next"; }
bool is_moe(const ModelConfig& config) {
  return is_next(config) || config.model_type.starts_with("qwen3_5_moe");
}

// What the layer lists say: full_attention_interval, layer_types, or both in agreement.
std::vector<Mixer> read_mixers(const ConfigReader& reader) {
  const int64_t layers = reader.integer({"num_hidden_layers"}, kLayersRange);
  const json* types = reader.list({"layer_types"});
  const bool has_interval = reader.has("full_attention_interval") || !types;
  const int64_t interval = reader.integer({"full_attention_interval"}, kLayersRange, 4);
  if (types && static_cast<int64_t>(types->size()) != layers) {
    reader.refuse("layer_types", concat("num_hidden_layers = ", layers, " names"),
                  std::to_string(types->size()));
  }
  std::vector<Mixer> mixers;
  for (int64_t i = 0; i < layers; ++i) {
    const Mixer by_interval = (i + 1) % interval == 0 ? Mixer::kAttention : Mixer::kGatedDelta;
    if (!types) {
      mixers.push_back(by_interval);
      continue;
    }
    const json& type = (*types)[static_cast<size_t>(i)];
    if (type != "full_attention" && type != "linear_attention") {
      reader.refuse("layer_types", "linear_attention or full_attention",
                    concat(describe(type), " for layer ", i));
    }
    mixers.push_back(type == "full_attention" ? Mixer::kAttention : Mixer::kGatedDelta);
    if (has_interval && mixers.back() != by_interval) {
      reader.refuse("layer_types", concat("what full_attention_interval = ", interval, " says"),
                    concat(describe(type), " for layer ", i));
    }
  }
  return mixers;
}

void read_layers(const ConfigReader& reader, ModelConfig& config) {
  const std::vector<Mixer> mixers = read_mixers(reader);
  const auto count = static_cast<int64_t>(mixers.size());
  std::vector<bool> dense(mixers.size(), !is_moe(config));
  if (is_moe(config)) {
    const int64_t experts =
        reader.integer({"num_experts"}, {0, kCountRange.high}, is_next(config) ? 512 : 256);
    const int64_t step = reader.integer({"decoder_sparse_step"}, kLayersRange, 1);
    for (int64_t i = 0; i < count; ++i) {
      dense[static_cast<size_t>(i)] = experts == 0 || (i + 1) % step != 0;
    }
    if (const json* only = reader.list({"mlp_only_layers"})) {
      for (const json& layer : *only) {
        const bool valid = layer.is_number_unsigned() && layer.get<uint64_t>() < mixers.size();
        if (!valid) {
          reader.refuse("mlp_only_layers", concat("layers from 0 to ", count - 1), describe(layer));
        }
        dense[layer.get<size_t>()] = true;
      }
    }
  }
  for (size_t i = 0; i < mixers.size(); ++i) {
    config.layers.push_back({mixers[i], dense[i] ? ChannelMix::kDense : ChannelMix::kMoe});
  }
}

void read_gated_delta(const ConfigReader& reader, ModelConfig& config) {
  GatedDeltaConfig& g = config.gated_delta;
  g.key_heads = reader.integer({"linear_num_key_heads"}, kCountRange, 16);
  g.value_heads = reader.integer({"linear_num_value_heads"}, kCountRange, 32);
  g.key_dim = reader.integer({"linear_key_head_dim"}, {1, kMaxStateDim}, 128);
  g.value_dim = reader.integer({"linear_value_head_dim"}, kHeadDimRange, 128);
  check_divides(reader, "linear_num_value_heads", g.value_heads, "linear_num_key_heads",
                g.key_heads);
  reader.expect_text({"output_gate_type"}, {"silu", "swish", "sigmoid"});
  if (reader.text({"output_gate_type"}, "silu") == "sigmoid") g.output_gate = GateKind::kSigmoid;
  config.conv_kernel = reader.integer({"linear_conv_kernel_dim"}, kKernelRange, 4);
}

void read_gated_attention(const ConfigReader& reader, ModelConfig& config) {
  AttentionConfig& a = config.attention;
  read_attention(reader, 16, is_moe(config) ? 2 : 4, 256, a);
  a.qk_norm = true;
  a.output_gate = reader.flag({"attn_output_gate"}, true);
  if (a.bias) reader.refuse("attention_bias", "false", "true");
  if (reader.flag({"use_sliding_window"}, false)) {
    reader.refuse("use_sliding_window", "false", "true");
  }
  read_rope(reader, is_next(config) ? 1e4 : 1e7, 0.25, a);
}

void read_moe(const ConfigReader& reader, ModelConfig& config) {
  const bool next = is_next(config);
  MoeConfig& moe = config.moe;
  moe.experts = reader.integer({"num_experts"}, kCountRange, next ? 512 : 256);
  moe.top_k = reader.integer({"num_experts_per_tok"}, {1, moe.experts}, next ? 10 : 8);
  moe.intermediate = reader.integer({"moe_intermediate_size"}, kWidthRange, 512);
  moe.shared_intermediate =
      reader.integer({"shared_expert_intermediate_size"}, {0, kWidthRange.high}, 512);
  moe.shared_gate = moe.shared_intermediate > 0;
  moe.renormalize = reader.flag({"norm_topk_prob"}, true);
}

void read_text_config(const ConfigReader& reader, ModelConfig& config) {
  config.vocab_size = reader.integer({"vocab_size"}, kWidthRange);
  config.hidden_size = reader.integer({"hidden_size"}, kWidthRange);
  config.max_positions = reader.integer({"max_position_embeddings"}, kPositionsRange, 0);
  config.norm_eps = read_norm_eps(reader, {"rms_norm_eps"}, 1e-6);
  config.tied_embeddings = reader.flag({"tie_word_embeddings"}, false);
  config.activation = MlpActivation::kSwiGlu;
  reader.expect_text({"hidden_act"}, {"silu", "swish"});
  config.state_dtype = read_state_dtype(reader, {"mamba_ssm_dtype"});
  read_layers(reader, config);
  read_gated_delta(reader, config);
  read_gated_attention(reader, config);
  const int64_t intermediate =
      reader.integer({"intermediate_size"}, kWidthRange, is_next(config) ? 5120 : 12288);
  if (config.has(ChannelMix::kDense)) config.intermediate = intermediate;
  if (config.has(ChannelMix::kMoe)) read_moe(reader, config);
  // Qwen3-Next does not announce its block.
  if (reader.integer({"mtp_num_hidden_layers"}, {0, 1}, is_next(config) ? 1 : 0) == 1) {
    const bool moe = config.has(ChannelMix::kMoe);
    config.mtp = {{Mixer::kAttention, moe ? ChannelMix::kMoe : ChannelMix::kDense}};
  }
  if (reader.flag({"mtp_use_dedicated_embeddings"}, false)) {
    reader.refuse("mtp_use_dedicated_embeddings", "false", "true");
  }
}

// Multimodal checkpoints nest the text model's keys under text_config.
void read_config(const ConfigReader& reader, ModelConfig& config) {
  const std::optional<ConfigReader> text = reader.object("text_config");
  if (!text) return read_text_config(reader, config);
  const std::string text_type = config.model_type + "_text";
  text->expect_text({"model_type"}, {config.model_type, text_type});
  if (config.model_type.ends_with("_text") || is_next(config)) {
    reader.refuse("text_config", concat("no such key for model_type ", config.model_type),
                  "an object");
  }
  read_text_config(ConfigReader(text->raw(), reader.file(), "text_config.", &reader), config);
}

Tensor take_norm(WeightReader& reader, const std::string& name, int64_t width) {
  return one_plus(reader.take(name, {width}));
}

// Rows of a projection that is interleaved by group: in each group of `stride` rows the `count`
// from `offset` on.
void add_rows(std::vector<RowRange>& rows, int64_t groups, int64_t stride, int64_t offset,
              int64_t count) {
  for (int64_t g = 0; g < groups; ++g) rows.push_back({g * stride + offset, count});
}

// Qwen3-Next interleaves its projections by key head: q | k | v | z and b | a.
void read_interleaved(WeightReader& reader, const std::string& prefix, const ModelConfig& config,
                      GatedDeltaWeights& w) {
  const GatedDeltaConfig& g = config.gated_delta;
  const int64_t hidden = config.hidden_size;
  const int64_t ratio = g.value_heads / g.key_heads;
  const int64_t values = ratio * g.value_dim;
  const int64_t stride = 2 * g.key_dim + 2 * values;
  const Tensor qkvz = reader.take(prefix + "in_proj_qkvz.weight", {g.key_heads * stride, hidden});
  std::vector<RowRange> qkv, z, beta, alpha;
  add_rows(qkv, g.key_heads, stride, 0, g.key_dim);
  add_rows(qkv, g.key_heads, stride, g.key_dim, g.key_dim);
  add_rows(qkv, g.key_heads, stride, 2 * g.key_dim, values);
  add_rows(z, g.key_heads, stride, 2 * g.key_dim + values, values);
  w.qkv = gather_rows(qkvz, qkv);
  w.z = gather_rows(qkvz, z);
  const Tensor ba = reader.take(prefix + "in_proj_ba.weight", {2 * g.value_heads, hidden});
  add_rows(beta, g.key_heads, 2 * ratio, 0, ratio);
  add_rows(alpha, g.key_heads, 2 * ratio, ratio, ratio);
  w.beta = gather_rows(ba, beta);
  w.alpha = gather_rows(ba, alpha);
}

GatedDeltaWeights read_gated_delta_weights(WeightReader& reader, const std::string& prefix,
                                           const ModelConfig& config) {
  const GatedDeltaConfig& g = config.gated_delta;
  const int64_t hidden = config.hidden_size;
  GatedDeltaWeights w;
  if (reader.has(prefix + "in_proj_qkvz.weight")) {
    read_interleaved(reader, prefix, config, w);
  } else {
    w.qkv = reader.take(prefix + "in_proj_qkv.weight", {g.conv_channels(), hidden});
    w.z = reader.take(prefix + "in_proj_z.weight", {g.inner(), hidden});
    w.beta = reader.take(prefix + "in_proj_b.weight", {g.value_heads, hidden});
    w.alpha = reader.take(prefix + "in_proj_a.weight", {g.value_heads, hidden});
  }
  w.conv_weight =
      reader.take_filter(prefix + "conv1d.weight", g.conv_channels(), config.conv_kernel);
  w.dt_bias = reader.take(prefix + "dt_bias", {g.value_heads});
  w.a_log = reader.take(prefix + "A_log", {g.value_heads});
  w.norm = reader.take(prefix + "norm.weight", {g.value_dim});
  w.out_proj = reader.take(prefix + "out_proj.weight", {hidden, g.inner()});
  return w;
}

AttentionWeights read_attention_weights(WeightReader& reader, const std::string& prefix,
                                        const ModelConfig& config) {
  const AttentionConfig& a = config.attention;
  const int64_t hidden = config.hidden_size, dim = a.head_dim;
  const int64_t q = a.heads * dim, kv = a.kv_heads * dim;
  AttentionWeights w;
  w.q = reader.take(prefix + "q_proj.weight", {a.output_gate ? 2 * q : q, hidden});
  if (a.output_gate) {  // per head: query rows, then gate rows
    std::vector<RowRange> query, gate;
    add_rows(query, a.heads, 2 * dim, 0, dim);
    add_rows(gate, a.heads, 2 * dim, dim, dim);
    w.gate = gather_rows(w.q, gate);
    w.q = gather_rows(w.q, query);
  }
  w.k = reader.take(prefix + "k_proj.weight", {kv, hidden});
  w.v = reader.take(prefix + "v_proj.weight", {kv, hidden});
  w.o = reader.take(prefix + "o_proj.weight", {hidden, q});
  w.q_norm = take_norm(reader, prefix + "q_norm.weight", dim);
  w.k_norm = take_norm(reader, prefix + "k_norm.weight", dim);
  return w;
}

MoeWeights read_moe_weights(WeightReader& reader, const std::string& prefix,
                            const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  const int64_t hidden = config.hidden_size;
  MoeWeights w;
  w.router = reader.take(prefix + "gate.weight", {moe.experts, hidden});
  w.experts = read_experts(reader, prefix + "experts.", config);
  if (moe.shared_intermediate > 0) {
    w.shared = read_mlp(reader, prefix + "shared_expert.", hidden, moe.shared_intermediate, config);
  }
  w.shared_gate =
      reader.take_if(moe.shared_gate, prefix + "shared_expert_gate.weight", {1, hidden});
  return w;
}

LayerWeights read_layer(WeightReader& reader, const std::string& prefix, LayerConfig layer,
                        const ModelConfig& config) {
  const int64_t hidden = config.hidden_size;
  LayerWeights w;
  w.mixer_norm = take_norm(reader, prefix + "input_layernorm.weight", hidden);
  w.channel_norm = take_norm(reader, prefix + "post_attention_layernorm.weight", hidden);
  if (layer.mixer == Mixer::kGatedDelta) {
    w.gated_delta = read_gated_delta_weights(reader, prefix + "linear_attn.", config);
  } else {
    w.attention = read_attention_weights(reader, prefix + "self_attn.", config);
  }
  if (layer.channel_mix == ChannelMix::kMoe) {
    w.moe = read_moe_weights(reader, prefix + "mlp.", config);
  } else {
    w.mlp = read_mlp(reader, prefix + "mlp.", hidden, config.intermediate, config);
  }
  return w;
}

MtpWeights read_mtp(WeightReader& reader, const std::string& prefix, const ModelConfig& config) {
  const int64_t hidden = config.hidden_size;
  MtpWeights w;
  w.fc = reader.take(prefix + "fc.weight", {hidden, 2 * hidden});
  w.embedding_norm = take_norm(reader, prefix + "pre_fc_norm_embedding.weight", hidden);
  w.hidden_norm = take_norm(reader, prefix + "pre_fc_norm_hidden.weight", hidden);
  w.norm = take_norm(reader, prefix + "norm.weight", hidden);
  w.layers.push_back(read_layer(reader, prefix + "layers.0.", config.mtp.front(), config));
  return w;
}

void read_weights(WeightReader& reader, const ModelConfig& config, ModelWeights& weights) {
  constexpr std::string_view kBodies[] = {"model.language_model.", "language_model.model.",
                                          "model."};
  constexpr std::string_view kEmbeddings[] = {"embed_tokens.weight"};
  const Roots roots = find_roots(reader, kBodies, kEmbeddings);
  read_vocabulary(reader, roots, config, weights);
  weights.final_norm = take_norm(reader, roots.body + "norm.weight", config.hidden_size);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    weights.layers.push_back(
        read_layer(reader, concat(roots.body, "layers.", i, "."), config.layers[i], config));
  }
  // Re-saved checkpoints drop the block that their configuration still announces.
  const std::string mtp = roots.head + "mtp.";
  if (!config.mtp.empty() && reader.may_have(mtp)) {
    weights.mtp.push_back(read_mtp(reader, mtp, config));
  } else {
    reader.skip(mtp);
  }
  for (const char* vision : {"model.visual.", "visual."}) reader.skip(vision);
}

constexpr ModelFamily kFamilies[] = {
    {"qwen3_5", "Qwen3_5ForConditionalGeneration", read_config, read_weights},
    {"qwen3_5_text", "Qwen3_5ForCausalLM", read_config, read_weights},
    {"qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", read_config, read_weights},
    {"qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", read_config, read_weights},
    {"qwen3_next", "Qwen3NextForCausalLM", read_config, read_weights},
};

}  // namespace

std::span<const ModelFamily> qwen_families() { return kFamilies; }

}  // namespace replayssm
