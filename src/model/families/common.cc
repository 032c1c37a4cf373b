#include "model/families/common.h"

#include <cmath>
#include <limits>

#include "core/check.h"
#include "model/json_text.h"

namespace replayssm {

using nlohmann::json;

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
  w.norm = reader.take(prefix + "norm.weight", {inner});
  w.out_proj = reader.take(prefix + "out_proj.weight", {hidden, inner});
  w.out_proj_bias = reader.take_if(m.projection_bias, prefix + "out_proj.bias", {hidden});
  return w;
}

MlpWeights read_mlp(WeightReader& reader, const std::string& prefix, int64_t width,
                    int64_t intermediate, const ModelConfig& config) {
  const bool gated = config.activation == MlpActivation::kSwiGlu;
  MlpWeights w;
  w.gate = reader.take_if(gated, prefix + "gate_proj.weight", {intermediate, width});
  w.up = reader.take(prefix + "up_proj.weight", {intermediate, width});
  w.down = reader.take(prefix + "down_proj.weight", {width, intermediate});
  w.up_bias = reader.take_if(config.mlp_bias, prefix + "up_proj.bias", {intermediate});
  w.down_bias = reader.take_if(config.mlp_bias, prefix + "down_proj.bias", {width});
  return w;
}

std::vector<MlpWeights> read_experts(WeightReader& reader, const std::string& prefix,
                                     const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  const int64_t width = moe.latent ? moe.latent : config.hidden_size;
  const bool gated = config.activation == MlpActivation::kSwiGlu;
  std::vector<MlpWeights> experts(static_cast<size_t>(moe.experts));
  if (!reader.has(prefix + "down_proj")) {
    for (size_t i = 0; i < experts.size(); ++i) {
      experts[i] = read_mlp(reader, concat(prefix, i, "."), width, moe.intermediate, config);
    }
    return experts;
  }
  if (config.mlp_bias) fail(reader.folder(), ": biases of fused experts are not supported");
  const int64_t parts = gated ? 2 : 1;
  std::vector<Tensor> in =
      reader.take_pieces(prefix + (gated ? "gate_up_proj" : "up_proj"),
                         {moe.experts, parts * moe.intermediate, width}, {moe.intermediate, width});
  std::vector<Tensor> down = reader.take_pieces(
      prefix + "down_proj", {moe.experts, width, moe.intermediate}, {width, moe.intermediate});
  for (size_t i = 0; i < experts.size(); ++i) {
    if (gated) experts[i].gate = std::move(in[2 * i]);
    experts[i].up = std::move(in[gated ? 2 * i + 1 : i]);
    experts[i].down = std::move(down[i]);
  }
  return experts;
}

}  // namespace replayssm
