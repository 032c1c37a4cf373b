// Every dialect that tests/tools/make_dialects.py derives loads to the weights of its source.
#include <gtest/gtest.h>

#include <cstring>

#include "core/check.h"
#include "model/config.h"
#include "model/folders.h"
#include "model/weights.h"

namespace replayssm::testing {
namespace {

using nlohmann::json;

std::filesystem::path fixtures() { return REPLAYSSM_DIALECTS_DIR; }

std::filesystem::path folder_of(const std::string& source) {
  constexpr std::string_view kFixture = "fixture:";
  if (source.starts_with(kFixture)) return fixtures() / source.substr(kFixture.size());
  return repository() / source;
}

// Everything that the forward pass reads.
json facts(const ModelConfig& c) {
  json layers;
  for (const LayerConfig& layer : c.layers) {
    layers.push_back({layer.mixer, layer.channel_mix, layer.second});
  }
  const auto& [m, g, a, e] = std::tie(c.mamba2, c.gated_delta, c.attention, c.moe);
  const auto& [k, l] = std::tie(c.kimi_delta, c.latent_attention);
  return {{"sizes", {c.vocab_size, c.hidden_size, c.conv_kernel, c.intermediate}},
          {"layers", layers},
          {"floats", {c.norm_eps, m.dt_min, m.dt_max, a.rope_theta, a.scale, e.scale}},
          {"flags",
           {c.mlp_bias, m.conv_bias, m.projection_bias, a.qk_norm, a.output_gate, a.bias,
            e.sigmoid_scores, e.correction_bias, e.renormalize, e.shared_gate}},
          {"kinds", {c.activation, c.state_dtype, g.output_gate}},
          {"mamba2", {m.heads, m.head_dim, m.groups, m.state_dim}},
          {"gated_delta", {g.key_heads, g.value_heads, g.key_dim, g.value_dim}},
          {"attention", {a.heads, a.kv_heads, a.head_dim, a.rotary_dim}},
          {"moe", {e.experts, e.top_k, e.intermediate, e.shared_intermediate, e.latent}},
          {"moe groups", {e.groups, e.top_groups}},
          {"kimi_delta", {k.heads, k.head_dim, k.gate_lower_bound, k.output_gate}},
          {"latent", {l.heads, l.latent, l.key_dim, l.shared_dim, l.value_dim}},
          {"latent floats", {l.scale, l.norm_eps}},
          {"scales",
           {c.embedding_scale, c.residual_scale, c.logit_scale, c.mlp_gate_scale,
            c.mlp_output_scale, a.input_scale, a.output_scale, m.input_scale, m.output_scale}},
          {"projection scales", m.projection_scale},
          {"mamba2 flags", {m.output_bias, m.gate_first}}};
}

void expect_same_bits(const std::string& name, const Tensor& got, const Tensor& want,
                      bool same_types) {
  ASSERT_EQ(got.shape, want.shape) << name;
  if (same_types) {
    ASSERT_EQ(got.dtype, want.dtype) << name;
    ASSERT_EQ(std::memcmp(got.data, want.data, static_cast<size_t>(want.bytes())), 0) << name;
  }
  const std::vector<float> a = got.to_floats(), b = want.to_floats();
  ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << name;
}

TEST(Dialects, LoadToTheirSourcesWeights) {
  const json manifest = json::parse(read_file(fixtures() / "manifest.json"));
  ASSERT_GE(manifest["fixtures"].size(), 40);
  for (const json& fixture : manifest["fixtures"]) {
    const std::string name = fixture["name"];
    SCOPED_TRACE(name);
    const auto source = folder_of(fixture["source"]), folder = fixtures() / name;
    const ModelConfig want = load_config(source), got = load_config(folder);
    const ModelWeights want_weights = load_weights(source, want);
    const ModelWeights got_weights = load_weights(folder, got);
    EXPECT_EQ(got_weights.skipped.size(), fixture["skipped"].get<size_t>());
    if (fixture["expect"] == "same logits") continue;  // multipliers and weights that differ
    EXPECT_EQ(facts(got), facts(want));
    const bool same = fixture["expect"] == "same";
    EXPECT_EQ(got.mamba2.norm_groups == want.mamba2.norm_groups, same);
    const auto want_list = list_tensors(want_weights), got_list = list_tensors(got_weights);
    ASSERT_EQ(got_list.size(), want_list.size());
    for (const auto& [place, tensor] : want_list) {
      ASSERT_TRUE(got_list.contains(place)) << place;
      expect_same_bits(place, got_list.at(place), tensor, fixture["same_types"]);
    }
  }
}

// Element types were really converted, so that the comparison above compares something.
TEST(Dialects, ConvertedTypes) {
  const std::pair<const char*, DType> cases[] = {{"nemotron_h_float32", DType::kFloat32},
                                                 {"nemotron_h_float16", DType::kFloat16},
                                                 {"qwen_float16", DType::kFloat16}};
  for (const auto& [name, dtype] : cases) {
    const auto folder = fixtures() / name;
    int64_t converted = 0;
    const ModelWeights weights = load_weights(folder, load_config(folder));
    for (const auto& [place, tensor] : list_tensors(weights)) converted += tensor.dtype == dtype;
    EXPECT_GE(converted, 20) << name;
  }
}

}  // namespace
}  // namespace replayssm::testing
