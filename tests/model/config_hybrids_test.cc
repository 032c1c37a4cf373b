// What load_config accepts, derives and refuses of Bamba, Falcon-H1, Granite 4 and Kimi-Linear.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "model/config_cases.h"

namespace replayssm::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class BadHybridConfig : public ::testing::TestWithParam<BadCase> {};

TEST_P(BadHybridConfig, IsRefused) { expect_refused(GetParam(), golden(GetParam().source)); }

INSTANTIATE_TEST_SUITE_P(
    Mamba2Hybrids, BadHybridConfig,
    ::testing::Values(
        BadCase{"bamba", "attn_layer_indices", {3}, {"attn_layer_indices: ", "from 0 to 2, got 3"}},
        BadCase{"bamba", "attn_layer_indices", {"1"}, {"layers from 0 to 2, got \"1\""}},
        BadCase{"bamba",
                "layer_types",
                {"mamba", "mamba", "attention"},
                {"attn_layer_indices and layer_types disagree about layer 1"}},
        BadCase{"bamba", "layers_block_type", {"mamba"}, {"num_hidden_layers = 3 names, got 1"}},
        BadCase{"bamba",
                "layer_types",
                {"mamba", "moe", "mamba"},
                {"layer_types: expected \"attention\" or", "\"moe\" for layer 1"}},
        BadCase{"bamba",
                "mamba_d_head",
                8,
                {"mamba_n_heads * mamba_d_head = mamba_expand * hidden_size = 128, got 64"}},
        BadCase{"bamba", "mamba_d_head", "wide", {"mamba_d_head: expected an integer"}},
        BadCase{"bamba", "mamba_n_groups", 3, {"mamba_n_heads: expected a multiple of", "got 8"}},
        BadCase{"bamba", "mamba_expand", 4, {"mamba_expand * hidden_size = 256, got 128"}},
        BadCase{"bamba", "attn_rotary_emb", 16, {"attn_rotary_emb: expected", "= 8, got 16"}},
        BadCase{"bamba", "partial_rotary_factor", 1.0, {"partial_rotary_factor", "disagree"}},
        BadCase{"bamba", "rope_theta", 5, {"rope_theta", "disagree"}},
        BadCase{"bamba", "num_attention_heads", 3, {"multiple of num_attention_heads = 3, got 64"}},
        BadCase{"bamba", "hidden_act", "gelu", {"hidden_act: expected"}},
        BadCase{"bamba", "vocab_size", "<absent>", {"vocab_size: ", "got nothing"}},
        BadCase{"falcon_h1", "layer_types", {"hybrid", "mamba"}, {"\"mamba\" for layer 1"}},
        BadCase{"falcon_h1", "mamba_d_ssm", 64, {"= mamba_d_ssm = 64, got 128"}},
        BadCase{"falcon_h1", "ssm_multipliers", {1, 1}, {"ssm_multipliers: expected 5 numbers"}},
        BadCase{"falcon_h1", "ssm_multipliers", {1, 1, 1, 1, 0}, {"expected 5 numbers", "got 0"}},
        BadCase{"falcon_h1", "mlp_multipliers", 2, {"mlp_multipliers: expected a list, got 2"}},
        BadCase{"falcon_h1", "key_multiplier", 0, {"key_multiplier: expected a number", "got 0"}},
        BadCase{"falcon_h1", "key_multiplier", {{"__float__", "NaN"}}, {"key_multiplier", "NaN"}},
        BadCase{"falcon_h1", "rope_parameters", "<absent>", {"rope_theta: ", "got nothing"}},
        BadCase{"falcon_h1", "rope_parameters/rope_type", "yarn", {"rope_type: ", "\"yarn\""}},
        BadCase{"granitemoehybrid",
                "position_embedding_type",
                "alibi",
                {"position_embedding_type: expected \"nope\" or \"rope\", got \"alibi\""}},
        BadCase{"granitemoehybrid",
                "layers_block_type",
                {"mamba", "mamba", "mamba"},
                {"layer_types and layers_block_type disagree about layer 1"}},
        BadCase{"granitemoehybrid", "num_experts_per_tok", 5, {"from 1 to 4, got 5"}},
        BadCase{"granitemoehybrid", "num_local_experts", -1, {"num_local_experts: "}},
        BadCase{"granitemoehybrid", "logits_scaling", 0, {"logits_scaling: expected a number"}},
        BadCase{"granitemoehybrid", "normalization_function", "layernorm", {"\"rmsnorm\""}}));

// Keys that may be null or absent.
TEST(Config, Mamba2HybridDefaults) {
  json config = golden("granitemoehybrid");
  config["num_key_value_heads"] = nullptr;
  config["num_local_experts"] = 0;
  config["num_experts_per_tok"] = 0;
  config["position_embedding_type"] = "rope";
  config.erase("layer_types");
  ModelConfig c = parse(config);
  EXPECT_EQ(c.attention.kv_heads, 4);
  EXPECT_EQ(c.attention.rotary_dim, 16);
  EXPECT_EQ(c.count(Mixer::kMamba2), 3);
  EXPECT_FALSE(c.has(ChannelMix::kMoe));
  EXPECT_EQ(c.intermediate, 48);
  config = golden("falcon_h1");
  config["mamba_d_ssm"] = nullptr;
  config["mamba_d_head"] = "auto";
  config["mamba_rms_norm"] = true;
  config["mamba_n_groups"] = 2;
  config["projectors_bias"] = true;
  c = parse(config);
  EXPECT_EQ(c.mamba2.inner(), 128);
  EXPECT_EQ(c.mamba2.norm_groups, 2);
  EXPECT_FALSE(c.mamba2.gate_first || c.mamba2.projection_bias);
  EXPECT_TRUE(c.mamba2.output_bias);
}

json published_kimi() {
  json config = golden("kimi_linear");
  for (const char* key : {"layer_types", "mlp_layer_types", "linear_head_dim"}) config.erase(key);
  config["linear_attn_config"] = {
      {"head_dim", 32}, {"kda_layers", {1, 2, 3}}, {"full_attn_layers", {4}}};
  config["first_k_dense_replace"] = 1;
  return config;
}

TEST(KimiConfig, ContradictionsAndGapsAreRefused) {
  ASSERT_EQ(error_for(published_kimi()), "");
  const std::tuple<std::string, json, std::string> cases[] = {
      {"/linear_attn_config/kda_layers",
       {0, 1, 2},
       "kda_layers: expected layers from 1 to 4, got 0"},
      {"/linear_attn_config/kda_layers", {1, 2}, "full_attn_layers, got no layer 3"},
      {"/linear_attn_config/kda_layers", {1, 2, 3, 4}, "every layer once, got 4 again"},
      {"/linear_attn_config/kda_layers", {1, 2, 3, 3}, "kda_layers: expected every layer once"},
      {"/linear_attn_config/full_attn_layers",
       {5},
       "full_attn_layers: expected layers from 1 to 4"},
      {"/linear_attn_config/full_attn_layers", nullptr, "full_attn_layers: expected a list"},
      {"/linear_attn_config", nullptr, "layer_types: expected it or linear_attn_config"},
      {"/linear_attn_config", {1}, "linear_attn_config: expected an object"},
      {"/layer_types",
       {"linear_attention", "full_attention", "linear_attention", "full_attention"},
       "layer_types and linear_attn_config.full_attn_layers disagree about layer 1"},
      {"/mlp_layer_types",
       {"dense", "dense", "sparse", "sparse"},
       "mlp_layer_types and first_k_dense_replace disagree about layer 1"},
      {"/mlp_layer_types", {"dense", "moe", "sparse", "sparse"}, "\"moe\" for layer 1"},
      {"/linear_head_dim", 16,
       "linear_attn_config.head_dim (32) and linear_head_dim (16) disagree"},
      {"/linear_attn_config/num_heads", 8, "num_heads (8) and linear_num_heads (4) disagree"},
      {"/linear_attn_config/gate_lower_bound", 5, "gate_lower_bound: expected a number"},
      {"/q_lora_rank", 16, "q_lora_rank: expected null, got 16"},
      {"/mla_use_nope", false, "mla_use_nope: expected true"},
      {"/attention_bias", true, "attention_bias: expected false"},
      {"/num_key_value_heads", 2, "num_key_value_heads: expected num_attention_heads = 4, got 2"},
      {"/qk_head_dim", 32, "qk_head_dim: expected qk_nope_head_dim + qk_rope_head_dim = 48"},
      {"/num_local_experts", 4, "num_experts (8) and num_local_experts (4) disagree"},
      {"/num_experts_per_token", 9, "num_experts_per_token: expected an integer from 1 to 8"},
      {"/num_expert_group", 3, "num_experts: expected a multiple of num_expert_group = 3, got 8"},
      {"/moe_router_activation_func", "softmax",
       "moe_router_activation_func: expected \"sigmoid\""},
      {"/routed_scaling_factor", nullptr, "routed_scaling_factor: expected a number, got nothing"},
      {"/num_nextn_predict_layers", 1, "num_nextn_predict_layers: expected 0, got 1"},
  };
  for (const auto& [key, value, words] : cases) {
    json config = published_kimi();
    config[json::json_pointer(key)] = value;
    EXPECT_THAT(error_for(config), HasSubstr(words)) << key;
  }
}

// Kimi-Linear-48B-A3B's published configuration, in what matters.
TEST(KimiConfig, Published48B) {
  const ModelConfig c = parse(json::parse(R"({"architectures": ["KimiLinearForCausalLM"],
      "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 72,
      "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32,
      "q_lora_rank": null, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
      "v_head_dim": 128, "mla_use_nope": true, "linear_attn_config": {"head_dim": 128,
      "num_heads": 32, "short_conv_kernel_size": 4,
      "kda_layers": [1,2,3,5,6,7,9,10,11,13,14,15,17,18,19,21,22,23,25,26],
      "full_attn_layers": [4,8,12,16,20,24,27]}, "num_experts": 256, "num_experts_per_token": 8,
      "num_shared_experts": 1, "moe_intermediate_size": 1024, "moe_renormalize": true,
      "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446,
      "use_grouped_topk": true, "num_expert_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
      "moe_layer_freq": 1, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "rope_scaling": null,
      "vocab_size": 163840, "tie_word_embeddings": false, "num_nextn_predict_layers": 0,
      "model_max_length": 1048576, "bos_token_id": 163584, "eos_token_id": 163586})"));
  EXPECT_EQ(c.count(Mixer::kKimiDelta), 20);
  EXPECT_EQ(c.count(Mixer::kLatentAttention), 7);
  EXPECT_EQ(c.layers[3].mixer, Mixer::kLatentAttention);
  EXPECT_EQ(c.layers[26].mixer, Mixer::kLatentAttention);
  EXPECT_EQ(std::ranges::count(c.layers, ChannelMix::kMoe, &LayerConfig::channel_mix), 26);
  EXPECT_EQ(c.kimi_delta.conv_channels(), 3 * 4096);
  EXPECT_EQ(c.latent_attention.cached(), 576);
  EXPECT_THAT(c.eos_ids, ElementsAre(163586));
}

}  // namespace
}  // namespace replayssm::testing
