#include "model/families/common.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "model/json_text.h"

namespace replayssm {

using nlohmann::json;

namespace {

constexpr double kMultiplierLow = 1e-6, kMultiplierHigh = 1e6;

}  // namespace

void check_divides(const ConfigReader& reader, std::string_view name, int64_t value,
                   std::string_view divisor_name, int64_t divisor) {
  if (value % divisor == 0) return;
  reader.refuse(name, concat("a multiple of ", divisor_name, " = ", divisor),
                std::to_string(value));
}

float read_norm_eps(const ConfigReader& reader, ConfigReader::Names names, double fallback) {
  return static_cast<float>(reader.number(names, 1e-30, 1, fallback));
}

DType read_state_dtype(const ConfigReader& reader, ConfigReader::Names names) {
  reader.expect_text(names, {"float32", "bfloat16", "float16"});
  const std::string name = reader.text(names, "float32");
  return name == "float32"    ? DType::kFloat32
         : name == "bfloat16" ? DType::kBFloat16
                              : DType::kFloat16;
}

void read_time_step_limit(const ConfigReader& reader, ConfigReader::Names names,
                          Mamba2Config& mamba2) {
  const json* limit = reader.list(names);
  if (!limit) return;
  const auto bound = [&](size_t i) { return json_number((*limit)[i]).value_or(-1); };
  const bool valid = limit->size() == 2 && bound(0) >= 0 && bound(0) < bound(1);
  if (!valid) {
    std::string got = "[";
    for (const json& value : *limit) got += (got.size() > 1 ? ", " : "") + describe(value);
    reader.refuse(*names.begin(), "two numbers, 0 <= lower < upper", got.substr(0, 100) + "]");
  }
  mamba2.dt_min = static_cast<float>(bound(0));
  mamba2.dt_max = static_cast<float>(bound(1));
}

void read_attention(const ConfigReader& reader, int64_t default_heads, int64_t default_kv_heads,
                    int64_t default_head_dim, AttentionConfig& attention) {
  attention.heads = reader.integer({"num_attention_heads"}, kCountRange, default_heads);
  attention.kv_heads = reader.integer({"num_key_value_heads"}, kCountRange, default_kv_heads);
  attention.head_dim =
      reader.integer({"head_dim", "attention_head_dim"}, kHeadDimRange, default_head_dim);
  check_divides(reader, "num_attention_heads", attention.heads, "num_key_value_heads",
                attention.kv_heads);
  attention.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(attention.head_dim)));
  attention.bias = reader.flag({"attention_bias"}, false);
}

void read_rope(const ConfigReader& reader, double default_theta, double default_factor,
               AttentionConfig& attention) {
  double theta = reader.number({"rope_theta"}, 1, 1e12, default_theta);
  double factor = reader.number({"partial_rotary_factor"}, 0, 1, default_factor);
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const std::optional<ConfigReader> object = reader.object(key);
    if (!object) continue;
    for (const auto& [name, value] : object->raw().items()) {
      if (value.is_object()) object->refuse(in_quotes(name), "a plain value", describe(value));
    }
    const ConfigReader rope(object->raw(), reader.file(), concat(key, "."), &reader);
    rope.expect_text({"rope_type", "type"}, {"default", "mrope"});
    theta = rope.number({"rope_theta"}, 1, 1e12, theta);
    factor = rope.number({"partial_rotary_factor"}, 0, 1, factor);
  }
  attention.rope_theta = theta;
  constexpr double kRounding = 1e-9;  // of head_dim * factor
  attention.rotary_dim =
      static_cast<int64_t>(static_cast<double>(attention.head_dim) * factor + kRounding);
  if (attention.rotary_dim < 2 || attention.rotary_dim % 2 != 0) {
    reader.refuse("partial_rotary_factor", "an even number of rotated dimensions",
                  concat(factor, " of head_dim = ", attention.head_dim));
  }
}

void read_expert_groups(const ConfigReader& reader, ConfigReader::Names names,
                        std::string_view experts_name, std::string_view top_k_name,
                        MoeConfig& moe) {
  const std::string_view name = *names.begin();
  moe.groups = reader.integer(names, {1, moe.experts}, 1);
  moe.top_groups = reader.integer({"topk_group"}, {1, moe.groups}, 1);
  check_divides(reader, experts_name, moe.experts, name, moe.groups);
  if (moe.groups > 1 && moe.experts / moe.groups < 2) {
    reader.refuse(name, "groups of at least two experts", std::to_string(moe.groups));
  }
  const int64_t selectable = moe.experts / moe.groups * moe.top_groups;
  if (moe.top_k > selectable) {
    reader.refuse(top_k_name, concat("at most the ", selectable, " experts of topk_group groups"),
                  std::to_string(moe.top_k));
  }
}

std::vector<float> read_multipliers(const ConfigReader& reader, std::string_view name,
                                    size_t count) {
  std::vector<float> multipliers;
  const json* list = reader.list({name});
  if (!list) return multipliers;
  const std::string expected =
      concat(count, " numbers from ", kMultiplierLow, " to ", kMultiplierHigh);
  if (list->size() != count) reader.refuse(name, expected, describe(*list));
  for (const json& value : *list) {
    const double number = json_number(value).value_or(0);
    if (!(number >= kMultiplierLow && number <= kMultiplierHigh)) {
      reader.refuse(name, expected, describe(value));
    }
    multipliers.push_back(static_cast<float>(number));
  }
  return multipliers;
}

float read_multiplier(const ConfigReader& reader, std::string_view name) {
  return static_cast<float>(reader.number({name}, kMultiplierLow, kMultiplierHigh, 1));
}

LayerChoice read_layer_names(const ConfigReader& reader, std::string_view key, int64_t layers,
                             ConfigReader::Names yes, ConfigReader::Names no) {
  LayerChoice choice{key, {}};
  const json* list = reader.list({key});
  if (!list) return choice;
  if (static_cast<int64_t>(list->size()) != layers) {
    reader.refuse(key, concat("num_hidden_layers = ", layers, " names"),
                  std::to_string(list->size()));
  }
  for (const json& item : *list) {
    const std::string name = item.is_string() ? item.get<std::string>() : "";
    const bool chosen = std::ranges::count(yes, name) > 0;
    if (!chosen && std::ranges::count(no, name) == 0) {
      std::string expected;
      for (const auto& names : {yes, no}) {
        for (const std::string_view known : names) {
          expected += (expected.empty() ? "" : " or ") + in_quotes(known);
        }
      }
      reader.refuse(key, expected, concat(describe(item), " for layer ", choice.layers.size()));
    }
    choice.layers.push_back(chosen);
  }
  return choice;
}

std::vector<bool> merge_choices(const ConfigReader& reader,
                                std::initializer_list<LayerChoice> choices) {
  const LayerChoice* first = nullptr;
  for (const LayerChoice& choice : choices) {
    if (choice.layers.empty()) continue;
    if (!first) first = &choice;
    const auto [a, b] = std::ranges::mismatch(first->layers, choice.layers);
    if (a == first->layers.end()) continue;
    fail(reader.file(), ": ", first->key, " and ", choice.key, " disagree about layer ",
         a - first->layers.begin());
  }
  return first ? first->layers : std::vector<bool>();
}

Roots find_roots(const WeightReader& reader, std::span<const std::string_view> bodies,
                 std::span<const std::string_view> embeddings) {
  std::string tried;
  for (const std::string_view body : bodies) {
    for (const std::string_view embedding : embeddings) {
      const std::string name = concat(body, embedding);
      tried += (tried.empty() ? "" : " or ") + in_quotes(name);
      if (!reader.has(name)) continue;
      Roots roots{std::string(body), name, ""};
      for (const char* head : {"language_model.", "model."}) {
        if (reader.has(concat(head, "lm_head.weight")) ||
            reader.has(concat(head, "mtp.fc.weight"))) {
          roots.head = head;
        }
      }
      return roots;
    }
  }
  fail(reader.folder(), ": missing tensor ", tried);
}

void read_vocabulary(WeightReader& reader, const Roots& roots, const ModelConfig& config,
                     ModelWeights& weights) {
  const WeightReader::Shape shape{config.vocab_size, config.hidden_size};
  const std::string head = roots.head + "lm_head.weight";
  weights.embedding = reader.take(roots.embedding, shape);
  if (config.tied_embeddings) {
    reader.skip_copy(head, roots.embedding);
  } else {
    weights.lm_head = reader.take(head, shape);
  }
}

Mamba2Weights read_mamba2(WeightReader& reader, const std::string& prefix,
                          const ModelConfig& config) {
  const Mamba2Config& m = config.mamba2;
  const int64_t hidden = config.hidden_size, inner = m.inner(), channels = m.conv_channels();
  const int64_t projected = inner + channels + m.heads;
  Mamba2Weights w;
  w.in_proj = reader.take(prefix + "in_proj.weight", {projected, hidden});
  w.in_proj_bias = reader.take_if(m.projection_bias, prefix + "in_proj.bias", {projected});
  w.conv_weight = reader.take_filter(prefix + "conv1d.weight", channels, config.conv_kernel);
  w.conv_bias = reader.take_if(m.conv_bias, prefix + "conv1d.bias", {channels});
  w.dt_bias = reader.take(prefix + "dt_bias", {m.heads});
  w.a_log = reader.take(prefix + "A_log", {m.heads});
  w.d = reader.take(prefix + "D", {m.heads});
  w.norm = reader.take_if(m.norm_groups > 0, prefix + "norm.weight", {inner});
  w.out_proj = reader.take(prefix + "out_proj.weight", {hidden, inner});
  w.out_proj_bias = reader.take_if(m.output_bias, prefix + "out_proj.bias", {hidden});
  return w;
}

AttentionWeights read_plain_attention(WeightReader& reader, const std::string& prefix,
                                      const ModelConfig& config) {
  const AttentionConfig& a = config.attention;
  const int64_t hidden = config.hidden_size;
  const int64_t q = a.heads * a.head_dim, kv = a.kv_heads * a.head_dim;
  AttentionWeights w;
  w.q = reader.take(prefix + "q_proj.weight", {q, hidden});
  w.k = reader.take(prefix + "k_proj.weight", {kv, hidden});
  w.v = reader.take(prefix + "v_proj.weight", {kv, hidden});
  w.o = reader.take(prefix + "o_proj.weight", {hidden, q});
  w.q_bias = reader.take_if(a.bias, prefix + "q_proj.bias", {q});
  w.k_bias = reader.take_if(a.bias, prefix + "k_proj.bias", {kv});
  w.v_bias = reader.take_if(a.bias, prefix + "v_proj.bias", {kv});
  w.o_bias = reader.take_if(a.bias, prefix + "o_proj.bias", {hidden});
  return w;
}

MlpWeights read_mlp(WeightReader& reader, const std::string& prefix, int64_t width,
                    int64_t intermediate, const ModelConfig& config, const MlpNames& names) {
  const bool gated = config.activation == MlpActivation::kSwiGlu, bias = config.mlp_bias;
  MlpWeights w;
  w.gate = reader.take_if(gated, concat(prefix, names.gate, ".weight"), {intermediate, width});
  w.up = reader.take(concat(prefix, names.up, ".weight"), {intermediate, width});
  w.down = reader.take(concat(prefix, names.down, ".weight"), {width, intermediate});
  w.gate_bias = reader.take_if(gated && bias, concat(prefix, names.gate, ".bias"), {intermediate});
  w.up_bias = reader.take_if(bias, concat(prefix, names.up, ".bias"), {intermediate});
  w.down_bias = reader.take_if(bias, concat(prefix, names.down, ".bias"), {width});
  return w;
}

std::vector<MlpWeights> read_experts(WeightReader& reader, const std::string& prefix,
                                     const ModelConfig& config, const MlpNames& names) {
  if (reader.has(prefix + "down_proj")) {
    const bool gated = config.activation == MlpActivation::kSwiGlu;
    return read_fused_experts(reader, prefix + (gated ? "gate_up_proj" : "up_proj"),
                              prefix + "down_proj", config);
  }
  const MoeConfig& moe = config.moe;
  const int64_t width = moe.latent ? moe.latent : config.hidden_size;
  std::vector<MlpWeights> experts;
  // Nothing is reserved: a count that lies ends at the first missing tensor.
  for (int64_t i = 0; i < moe.experts; ++i) {
    experts.push_back(  // NOLINT(performance-inefficient-vector-operation)
        read_mlp(reader, concat(prefix, i, "."), width, moe.intermediate, config, names));
  }
  return experts;
}

std::vector<MlpWeights> read_fused_experts(WeightReader& reader, const std::string& in_name,
                                           const std::string& down_name,
                                           const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  const int64_t width = moe.latent ? moe.latent : config.hidden_size;
  const bool gated = config.activation == MlpActivation::kSwiGlu;
  std::vector<MlpWeights> experts(static_cast<size_t>(moe.experts));
  if (config.mlp_bias) fail(reader.folder(), ": biases of fused experts are not supported");
  const int64_t parts = gated ? 2 : 1;
  std::vector<Tensor> in = reader.take_pieces(
      in_name, {moe.experts, parts * moe.intermediate, width}, {moe.intermediate, width});
  std::vector<Tensor> down = reader.take_pieces(down_name, {moe.experts, width, moe.intermediate},
                                                {width, moe.intermediate});
  for (size_t i = 0; i < experts.size(); ++i) {
    if (gated) experts[i].gate = std::move(in[2 * i]);
    experts[i].up = std::move(in[gated ? 2 * i + 1 : i]);
    experts[i].down = std::move(down[i]);
  }
  return experts;
}

}  // namespace replayssm
