// Pure Mamba-2, in the Hugging Face dialect and in the original one (d_model, n_layer, ssm_cfg).
#include <algorithm>

#include "core/check.h"
#include "model/families/common.h"
#include "model/json_text.h"
#include "replayssm/ops.h"

namespace replayssm {
namespace {

constexpr ConfigReader::Range kStateDimRange{1, kMaxStateDim};

void finish_config(const ConfigReader& reader, int64_t layers, ModelConfig& config) {
  check_divides(reader, "the number of heads", config.mamba2.heads, "the number of groups",
                config.mamba2.groups);
  config.layers.assign(static_cast<size_t>(layers), {Mixer::kMamba2, ChannelMix::kNone});
}

void read_hugging_face(const ConfigReader& reader, ModelConfig& config) {
  Mamba2Config& m = config.mamba2;
  config.vocab_size = reader.integer({"vocab_size"}, kWidthRange, 32768);
  // Conversions keep the original keys beside the new ones.
  config.hidden_size = reader.integer({"hidden_size", "d_model"}, kWidthRange, 4096);
  const int64_t layers = reader.integer({"num_hidden_layers", "n_layer"}, kLayersRange, 64);
  m.heads = reader.integer({"num_heads"}, kCountRange, 128);
  m.head_dim = reader.integer({"head_dim"}, kHeadDimRange, 64);
  m.groups = reader.integer({"n_groups"}, kCountRange, 8);
  m.state_dim = reader.integer({"state_size"}, kStateDimRange, 128);
  m.norm_groups = 1;
  m.conv_bias = reader.flag({"use_conv_bias"}, true);
  m.projection_bias = m.output_bias = reader.flag({"use_bias"}, false);
  read_time_step_limit(reader, {"time_step_limit"}, m);
  const int64_t expand = reader.integer({"expand"}, {1, 64}, 2);
  if (m.inner() != expand * config.hidden_size) {
    reader.refuse(
        "num_heads",
        concat("num_heads * head_dim = expand * hidden_size = ", expand * config.hidden_size),
        std::to_string(m.inner()));
  }
  config.conv_kernel = reader.integer({"conv_kernel"}, kKernelRange, 4);
  config.norm_eps = read_norm_eps(reader, {"layer_norm_epsilon"}, 1e-5);
  config.tied_embeddings = reader.flag({"tie_word_embeddings", "tie_embeddings"}, false);
  reader.expect_text({"hidden_act"}, {"silu", "swish"});
  if (!reader.flag({"rms_norm"}, true)) reader.refuse("rms_norm", "true", "false");
  if (!reader.raw().contains("eos_token_id") && config.vocab_size > 2) config.eos_ids = {2};
  if (!reader.raw().contains("bos_token_id")) config.bos_id = 0;
  finish_config(reader, layers, config);
}

// Keys of ssm_cfg that change neither the weights nor the mathematics.
constexpr std::string_view kInertKeys[] = {
    "layer",         "chunk_size",   "use_mem_eff_path", "dt_min",        "dt_max",
    "dt_init_floor", "A_init_range", "conv_init",        "process_group", "sequence_parallel",
    "device",        "dtype",        "layer_idx",
};
constexpr std::string_view kReadKeys[] = {
    "d_state", "d_conv",   "expand", "headdim",   "ngroups", "norm_before_gate",      "D_has_hdim",
    "rmsnorm", "dt_limit", "bias",   "conv_bias", "d_ssm",   "learnable_init_states", "activation",
};

void check_ssm_cfg(const ConfigReader& ssm, int64_t inner) {
  if (!ssm.has("layer")) ssm.refuse("layer", "\"Mamba2\"", "nothing, which means Mamba1");
  ssm.expect_text({"layer"}, {"Mamba2"});
  ssm.expect_text({"activation"}, {"silu", "swish"});
  for (const auto& [key, value] : ssm.raw().items()) {
    const std::string_view name = key;
    if (std::ranges::count(kInertKeys, name) == 0 && std::ranges::count(kReadKeys, name) == 0) {
      ssm.refuse(in_quotes(name), "a known option of Mamba2", describe(value));
    }
  }
  for (const char* key : {"norm_before_gate", "D_has_hdim", "learnable_init_states"}) {
    if (ssm.flag({key}, false)) ssm.refuse(key, "false", "true");
  }
  if (!ssm.flag({"rmsnorm"}, true)) ssm.refuse("rmsnorm", "true", "false");
  if (ssm.integer({"d_ssm"}, kWidthRange, inner) != inner) {
    ssm.refuse("d_ssm", concat("expand * d_model = ", inner), describe(*ssm.find({"d_ssm"})));
  }
}

void read_original(const ConfigReader& reader, ModelConfig& config) {
  const std::optional<ConfigReader> ssm = reader.object("ssm_cfg");
  if (!ssm) reader.refuse("ssm_cfg", "an object", "nothing");
  config.hidden_size = reader.integer({"d_model"}, kWidthRange);
  const int64_t layers = reader.integer({"n_layer"}, kLayersRange);
  const int64_t vocab = reader.integer({"vocab_size"}, kWidthRange);
  const int64_t multiple = reader.integer({"pad_vocab_size_multiple"}, kCountRange, 8);
  config.vocab_size = (vocab + multiple - 1) / multiple * multiple;
  if (reader.integer({"d_intermediate"}, {0, kWidthRange.high}, 0) != 0) {
    reader.refuse("d_intermediate", "0", describe(*reader.find({"d_intermediate"})));
  }
  const nlohmann::json* attention = reader.list({"attn_layer_idx"});
  if (attention && !attention->empty()) {
    reader.refuse("attn_layer_idx", "an empty list", describe(*attention));
  }
  if (!reader.flag({"rms_norm"}, true)) reader.refuse("rms_norm", "true", "false");
  config.tied_embeddings = reader.flag({"tie_embeddings", "tie_word_embeddings"}, true);
  config.norm_eps = 1e-5f;

  Mamba2Config& m = config.mamba2;
  const int64_t inner = ssm->integer({"expand"}, {1, 64}, 2) * config.hidden_size;
  check_ssm_cfg(*ssm, inner);
  m.head_dim = ssm->integer({"headdim"}, kHeadDimRange, 64);
  check_divides(*ssm, "expand * d_model", inner, "headdim", m.head_dim);
  m.heads = inner / m.head_dim;
  m.groups = ssm->integer({"ngroups"}, kCountRange, 1);
  m.norm_groups = m.groups;
  m.state_dim = ssm->integer({"d_state"}, kStateDimRange, 128);
  m.conv_bias = ssm->flag({"conv_bias"}, true);
  m.projection_bias = m.output_bias = ssm->flag({"bias"}, false);
  read_time_step_limit(*ssm, {"dt_limit"}, m);
  config.conv_kernel = ssm->integer({"d_conv"}, kKernelRange, 4);
  finish_config(*ssm, layers, config);
}

void read_config(const ConfigReader& reader, ModelConfig& config) {
  if (reader.has("d_model") && !reader.has("hidden_size")) {
    read_original(reader, config);
  } else {
    read_hugging_face(reader, config);
  }
}

void read_weights(WeightReader& reader, const ModelConfig& config, ModelWeights& weights) {
  constexpr std::string_view kBodies[] = {"backbone.", "model.backbone.", "model."};
  constexpr std::string_view kEmbeddings[] = {"embeddings.weight", "embedding.weight"};
  const Roots roots = find_roots(reader, kBodies, kEmbeddings);
  read_vocabulary(reader, roots, config, weights);
  weights.final_norm = reader.take(roots.body + "norm_f.weight", {config.hidden_size});
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const std::string layer = concat(roots.body, "layers.", i, ".");
    LayerWeights& w = weights.layers.emplace_back();
    w.mixer_norm = reader.take(layer + "norm.weight", {config.hidden_size});
    w.mamba2 = read_mamba2(reader, layer + "mixer.", config);
  }
}

constexpr ModelFamily kFamilies[] = {
    {"mamba2", "Mamba2ForCausalLM", read_config, read_weights},
};

}  // namespace

std::span<const ModelFamily> mamba2_families() { return kFamilies; }

}  // namespace replayssm
