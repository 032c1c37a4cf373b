// What load_config accepts, derives and refuses.
#include "model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.h"
#include "model/config_cases.h"
#include "model/config_parser.h"
#include "model/folders.h"

namespace replayssm::testing {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

json original_mamba2() {
  return json::parse(R"({"d_model": 768, "n_layer": 24, "vocab_size": 50277,
      "ssm_cfg": {"layer": "Mamba2"}, "pad_vocab_size_multiple": 16, "tie_embeddings": true})");
}

class BadConfig : public ::testing::TestWithParam<BadCase> {};

TEST_P(BadConfig, IsRefused) {
  const BadCase& c = GetParam();
  expect_refused(c, c.source == "original" ? original_mamba2() : golden(c.source));
}

const json kHuge = json::parse("99999999999999999999");

INSTANTIATE_TEST_SUITE_P(
    Architecture, BadConfig,
    ::testing::Values(
        BadCase{"mamba2", "model_type", "llama", {"unknown architecture \"llama\"", "nemotron_h"}},
        BadCase{"nemotron_h_moe", "model_type", "nemotron_h_puzzle", {"unknown architecture"}},
        BadCase{"mamba2", "model_type", 3, {"model_type: expected a string, got 3"}},
        BadCase{"mamba2",
                "quantization_config",
                {{"quant_method", "fp8"}},
                {"quantization_config: quantised checkpoints", "\"fp8\""}},
        BadCase{"qwen3_5_text", "quantization_config", 1, {"quantised checkpoints", "got 1"}}));

INSTANTIATE_TEST_SUITE_P(
    Nemotron, BadConfig,
    ::testing::Values(
        BadCase{"nemotron_h_moe",
                "hidden_size",
                -1,
                {"hidden_size: expected an integer from 1 to 16777216, got -1"}},
        BadCase{"nemotron_h_moe", "hidden_size", "<absent>", {"hidden_size: ", "got nothing"}},
        BadCase{"nemotron_h_moe", "hidden_size", nullptr, {"hidden_size: ", "got nothing"}},
        BadCase{"nemotron_h_moe", "hidden_size", "64", {"an integer", "got \"64\""}},
        BadCase{"nemotron_h_moe", "hidden_size", 64.5, {"an integer", "got 64.5"}},
        BadCase{"nemotron_h_moe", "hidden_size", true, {"an integer", "got true"}},
        BadCase{"nemotron_h_moe", "hidden_size", kHuge, {"an integer", "got 1"}},
        BadCase{"nemotron_h_moe", "hidden_size", uint64_t(1) << 63, {"got 9223372036854775808"}},
        BadCase{"nemotron_h_moe", "vocab_size", 0, {"vocab_size: expected", "got 0"}},
        BadCase{"nemotron_h_moe",
                "layers_block_type",
                "<absent>",
                {"hybrid_override_pattern: expected it or layers_block_type", "got nothing"}},
        BadCase{"nemotron_h_moe", "layers_block_type", json::array(), {"hybrid_override_pattern"}},
        BadCase{"nemotron_h_moe",
                "layers_block_type",
                {"mamba", "mambo"},
                {"layers_block_type: expected mamba", "\"mambo\" for layer 1"}},
        BadCase{"nemotron_h_moe", "layers_block_type", "M", {"expected a list, got \"M\""}},
        BadCase{"nemotron_h_moe",
                "hybrid_override_pattern",
                "ME*-MM",
                {"hybrid_override_pattern (6 layers) and layers_block_type", "disagree"}},
        BadCase{"nemotron_h_moe",
                "hybrid_override_pattern",
                "ME*",
                {"(3 layers) and layers_block_type (6 layers) disagree"}},
        BadCase{"nemotron_h_moe", "hybrid_override_pattern", "ME*-Mx", {"\"x\" for layer 5"}},
        BadCase{"nemotron_h_moe", "hybrid_override_pattern", std::string(5000, 'M'), {"5000"}},
        BadCase{"nemotron_h_moe",
                "num_hidden_layers",
                7,
                {"num_hidden_layers: expected the 6 layers that are named, got 7"}},
        BadCase{"nemotron_h_moe", "mtp_hybrid_override_pattern", "E*", {"disagree"}},
        BadCase{"nemotron_h_moe",
                "mamba_num_heads",
                5,
                {"mamba_num_heads: expected a multiple of n_groups = 2, got 5"}},
        BadCase{"nemotron_h_moe",
                "num_attention_heads",
                3,
                {"num_attention_heads: expected a multiple of num_key_value_heads = 2, got 3"}},
        BadCase{"nemotron_h_moe",
                "mamba_n_groups",
                4,
                {"n_groups (2) and mamba_n_groups (4) disagree"}},
        BadCase{"nemotron_h_moe", "rms_norm_eps", 1e-6, {"layer_norm_epsilon", "disagree"}},
        BadCase{"nemotron_h_moe", "layer_norm_epsilon", 0, {"layer_norm_epsilon", "got 0"}},
        BadCase{"nemotron_h_moe", "layer_norm_epsilon", {{"__float__", "NaN"}}, {"got NaN"}},
        BadCase{"nemotron_h_moe", "head_dim", 1 << 20, {"head_dim: expected"}},
        BadCase{"nemotron_h_moe", "ssm_state_size", 2048, {"from 1 to 1024, got 2048"}},
        BadCase{"nemotron_h_moe", "conv_kernel", 0, {"conv_kernel: expected"}},
        BadCase{"nemotron_h_moe",
                "time_step_limit",
                json::array({0.0}),
                {"time_step_limit: expected two numbers"}},
        BadCase{"nemotron_h_moe", "time_step_limit", json::array({0.1, 0.0}), {"[0.1, 0.0]"}},
        BadCase{"nemotron_h_moe", "time_step_limit", json::array({-1, 1}), {"two numbers"}},
        BadCase{"nemotron_h_moe", "time_step_limit", json::array({0, "inf"}), {"\"inf\""}},
        BadCase{"nemotron_h_moe", "mamba_ssm_cache_dtype", "int8", {"\"float32\" or", "\"int8\""}},
        BadCase{"nemotron_h_moe", "mlp_hidden_act", "gelu", {"\"relu2\"", "\"gelu\""}},
        BadCase{"nemotron_h_moe", "sliding_window", 128, {"sliding_window: expected null"}},
        BadCase{"nemotron_h_moe", "num_experts_per_tok", 5, {"from 1 to 4, got 5"}},
        BadCase{"nemotron_h_moe", "n_group", 3, {"a multiple of n_group = 3, got 4"}},
        BadCase{"nemotron_h_moe", "n_group", 4, {"n_group: expected groups of at least two"}},
        BadCase{"nemotron_h_moe", "topk_group", 2, {"topk_group: ", "from 1 to 1, got 2"}},
        BadCase{"nemotron_h_moe",
                "routed_scaling_factor",
                {{"__float__", "Infinity"}},
                {"routed_scaling_factor", "got Infinity"}},
        BadCase{"nemotron_h_moe", "use_conv_bias", 1, {"expected true or false, got 1"}},
        BadCase{"nemotron_h_moe", "use_bias", true, {"use_bias (true) and mamba_proj_bias"}},
        BadCase{"nemotron_h_moe", "eos_token_id", 256, {"eos_token_id: expected token ids from 0"}},
        BadCase{"nemotron_h_moe", "eos_token_id", -1, {"got -1"}},
        BadCase{"nemotron_h_moe", "eos_token_id", json::array({1, "2"}), {"got \"2\""}},
        BadCase{"nemotron_h_moe", "bos_token_id", "x", {"bos_token_id: ", "got \"x\""}}));

INSTANTIATE_TEST_SUITE_P(
    Mamba2, BadConfig,
    ::testing::Values(
        BadCase{"mamba2",
                "num_heads",
                7,
                {"num_heads * head_dim = expand * hidden_size = 128, got 112"}},
        BadCase{"mamba2", "n_groups", 3, {"multiple of the number of groups = 3, got 8"}},
        BadCase{"mamba2", "rms_norm", false, {"rms_norm: expected true, got false"}},
        BadCase{"mamba2", "d_model", 65, {"hidden_size (64) and d_model (65) disagree"}},
        BadCase{"mamba2", "hidden_act", "gelu", {"hidden_act: expected \"silu\""}},
        BadCase{"mamba2", "num_hidden_layers", 1 << 30, {"num_hidden_layers: expected"}},
        BadCase{"original", "d_intermediate", 8, {"d_intermediate: expected 0, got 8"}},
        BadCase{"original", "attn_layer_idx", {3}, {"attn_layer_idx: expected an empty list"}},
        BadCase{"original", "rms_norm", false, {"rms_norm: expected true"}},
        BadCase{"original", "ssm_cfg", json::object(), {"ssm_cfg.layer: ", "means Mamba1"}},
        BadCase{"original", "ssm_cfg", "<absent>", {"model_type: expected mamba2", "got nothing"}},
        BadCase{"original", "ssm_cfg/layer", "Mamba1", {"ssm_cfg.layer: expected \"Mamba2\""}},
        BadCase{"original", "ssm_cfg/headdim", 100, {"multiple of headdim = 100, got 1536"}},
        BadCase{"original", "ssm_cfg/norm_before_gate", true, {"ssm_cfg.norm_before_gate: "}},
        BadCase{"original", "ssm_cfg/D_has_hdim", true, {"ssm_cfg.D_has_hdim: expected false"}},
        BadCase{"original", "ssm_cfg/d_ssm", 768, {"ssm_cfg.d_ssm: expected", "1536, got 768"}},
        BadCase{"original", "ssm_cfg/dstate", 16, {"\"dstate\": expected a known option"}},
        BadCase{"original", "n_layer", 0, {"n_layer: expected"}}));

INSTANTIATE_TEST_SUITE_P(
    Qwen, BadConfig,
    ::testing::Values(
        BadCase{"qwen3_5_text",
                "num_hidden_layers",
                5,
                {"layer_types: expected num_hidden_layers = 5 names, got 4"}},
        BadCase{"qwen3_5_text", "num_hidden_layers", "<absent>", {"got nothing"}},
        BadCase{"qwen3_5_text",
                "full_attention_interval",
                3,
                {"layer_types: expected what full_attention_interval = 3", "for layer 2"}},
        BadCase{"qwen3_5_text", "layer_types", {"a", "b", "c", "d"}, {"\"a\" for layer 0"}},
        BadCase{"qwen3_5_text",
                "linear_num_value_heads",
                5,
                {"linear_num_value_heads: expected a multiple of linear_num_key_heads = 2, got 5"}},
        BadCase{"qwen3_5_text", "output_gate_type", "tanh", {"output_gate_type: "}},
        BadCase{"qwen3_5_text", "attention_bias", true, {"attention_bias: expected false"}},
        BadCase{"qwen3_5_text",
                "partial_rotary_factor",
                0.5,
                {"partial_rotary_factor (0.25) and partial_rotary_factor (0.5) disagree"}},
        BadCase{"qwen3_5_text", "rope_theta", 5e5, {"rope_parameters.rope_theta", "disagree"}},
        BadCase{"qwen3_5_text", "rope_parameters/rope_type", "yarn", {"rope_type: ", "\"yarn\""}},
        BadCase{"qwen3_5_text", "rope_scaling", {{"type", "yarn"}}, {"rope_scaling.type: "}},
        BadCase{"qwen3_5_text",
                "rope_parameters/full_attention",
                {{"rope_theta", 1}},
                {"rope_parameters.\"full_attention\": expected a plain value"}},
        BadCase{"qwen3_5_text", "rope_parameters", {{"partial_rotary_factor", 0.26}}, {"disagree"}},
        BadCase{"qwen3_5_text", "head_dim", 30, {"an even number of rotated dimensions"}},
        BadCase{"qwen3_5_text", "mtp_num_hidden_layers", 2, {"from 0 to 1, got 2"}},
        BadCase{"qwen3_5_text", "mtp_use_dedicated_embeddings", true, {"expected false"}},
        BadCase{"qwen3_5_text", "text_config", json::object(), {"text_config: expected no such"}},
        BadCase{"qwen3_5_moe_text", "num_experts_per_tok", 9, {"from 1 to 8, got 9"}},
        BadCase{"qwen3_next", "mlp_only_layers", {4}, {"layers from 0 to 3, got 4"}},
        BadCase{"qwen3_next", "decoder_sparse_step", 0, {"decoder_sparse_step: "}}));

json nested() {
  json text = golden("qwen3_5_text");
  return {{"model_type", "qwen3_5"}, {"text_config", text}, {"tie_word_embeddings", false}};
}

TEST(NestedConfig, LevelsMustAgree) {
  ASSERT_EQ(error_for(nested()), "");
  const std::tuple<std::string, json, std::string> cases[] = {
      {"/tie_word_embeddings", true, "text_config.tie_word_embeddings (false) and tie_word_embed"},
      {"/hidden_size", 65, "text_config.hidden_size (64) and hidden_size (65) disagree"},
      {"/text_config/model_type", "qwen3_5_moe_text", "text_config.model_type: expected"},
      {"/text_config/vocab_size", -5, "text_config.vocab_size: expected"},
      {"/text_config/eos_token_id", 999, "text_config.eos_token_id: expected token ids"},
      {"/text_config/quantization_config", json::object(), "quantised checkpoints"},
      {"/text_config", json::array(), "text_config: expected an object, got a list of 0"},
  };
  for (const auto& [key, value, words] : cases) {
    json config = nested();
    config[json::json_pointer(key)] = value;
    EXPECT_THAT(error_for(config), HasSubstr(words));
  }
}

TEST(NestedConfig, EitherLevelMayTie) {
  json config = nested();
  config["text_config"].erase("tie_word_embeddings");
  config["tie_word_embeddings"] = true;
  EXPECT_TRUE(parse(config).tied_embeddings);
  config.erase("tie_word_embeddings");
  config["text_config"]["tie_word_embeddings"] = true;
  EXPECT_TRUE(parse(config).tied_embeddings);
}

TEST(Config, OriginalMamba2Defaults) {
  const ModelConfig c = parse(original_mamba2());
  EXPECT_EQ(c.model_type, "mamba2");
  EXPECT_EQ(c.vocab_size, 50288);
  EXPECT_EQ(c.hidden_size, 768);
  EXPECT_EQ(c.layers.size(), 24);
  EXPECT_EQ(c.mamba2.heads, 24);
  EXPECT_EQ(c.mamba2.head_dim, 64);
  EXPECT_EQ(c.mamba2.groups, 1);
  EXPECT_EQ(c.mamba2.state_dim, 128);
  EXPECT_EQ(c.mamba2.conv_channels(), 1792);
  EXPECT_EQ(c.norm_eps, 1e-5f);
  EXPECT_TRUE(c.tied_embeddings);
  EXPECT_THAT(c.eos_ids, IsEmpty());
  json grouped = original_mamba2();
  grouped["ssm_cfg"]["ngroups"] = 8;
  EXPECT_EQ(parse(grouped).mamba2.norm_groups, 8);
}

TEST(Config, HuggingFaceMamba2Defaults) {
  const ModelConfig c = parse({{"model_type", "mamba2"}});
  EXPECT_EQ(c.vocab_size, 32768);
  EXPECT_EQ(c.hidden_size, 4096);
  EXPECT_EQ(c.layers.size(), 64);
  EXPECT_EQ(c.mamba2.heads, 128);
  EXPECT_EQ(c.mamba2.groups, 8);
  EXPECT_EQ(c.mamba2.norm_groups, 1);
  EXPECT_EQ(c.mamba2.conv_channels(), 8192 + 2048);
  EXPECT_FALSE(c.tied_embeddings);
  EXPECT_THAT(c.eos_ids, ElementsAre(2));
  EXPECT_EQ(c.bos_id, 0);
}

// Nemotron-3-Super's published configuration, in what matters.
TEST(Config, PublishedNemotronSuper) {
  const ModelConfig c = parse(json::parse(R"({"architectures": ["NemotronHForCausalLM"],
      "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
      "model_type": "nemotron_h", "num_hidden_layers": 88, "hidden_size": 4096, "vocab_size": 131072,
      "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 128,
      "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "expand": 2,
      "intermediate_size": 2688, "n_routed_experts": 512, "num_experts_per_tok": 22,
      "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
      "moe_latent_size": 1024, "routed_scaling_factor": 5.0, "layer_norm_epsilon": 1e-05,
      "norm_eps": 1e-05, "rope_theta": 10000, "partial_rotary_factor": 1.0,
      "num_nextn_predict_layers": 1, "max_position_embeddings": 262144, "eos_token_id": 2})"));
  EXPECT_EQ(c.count(Mixer::kMamba2), 40);
  EXPECT_EQ(c.count(Mixer::kAttention), 8);
  EXPECT_EQ(c.mamba2.inner() + c.mamba2.conv_channels() + c.mamba2.heads, 18560);
  EXPECT_EQ(c.attention.rotary_dim, 0);
  EXPECT_EQ(c.moe.latent, 1024);
  EXPECT_EQ(c.intermediate, 0);  // no dense layer
  ASSERT_EQ(c.mtp.size(), 2);    // unless it says otherwise
  EXPECT_EQ(c.mtp[0].mixer, Mixer::kAttention);
  EXPECT_EQ(c.mtp[1].channel_mix, ChannelMix::kMoe);
}

TEST(Config, EndOfSequenceIsTheUnionOfBothFiles) {
  json config = golden("nemotron_h_moe");
  const auto ids = [&](const json& eos, const std::string& generation) {
    config["eos_token_id"] = eos;
    if (generation.empty()) return parse(config).eos_ids;
    return parse_config({"config.json", config.dump()}, ConfigText{"generation.json", generation})
        .eos_ids;
  };
  EXPECT_THAT(ids(2, ""), ElementsAre(2));
  EXPECT_THAT(ids(2, R"({"eos_token_id": [2, 11]})"), ElementsAre(2, 11));
  EXPECT_THAT(ids({5, 5, 3}, R"({"eos_token_id": 4})"), ElementsAre(5, 3, 4));
  EXPECT_THAT(ids(nullptr, R"({"eos_token_id": 4})"), ElementsAre(4));
  EXPECT_THAT(ids(nullptr, R"({"eos_token_id": null})"), IsEmpty());
  EXPECT_THAT(error_of([&] { ids(2, R"({"eos_token_id": 256})"); }),
              HasSubstr("generation.json: eos_token_id: expected token ids from 0 to 255"));
  EXPECT_THAT(error_of([&] { ids(2, "{"); }), HasSubstr("generation.json: malformed JSON"));
}

TEST(Config, LayerPlacementOfExperts) {
  json config = golden("qwen3_next");
  config["decoder_sparse_step"] = 2;
  config["mlp_only_layers"] = {3};
  const ModelConfig c = parse(config);
  EXPECT_EQ(c.layers[0].channel_mix, ChannelMix::kDense);
  EXPECT_EQ(c.layers[1].channel_mix, ChannelMix::kMoe);
  EXPECT_EQ(c.layers[2].channel_mix, ChannelMix::kDense);
  EXPECT_EQ(c.layers[3].channel_mix, ChannelMix::kDense);
  EXPECT_EQ(c.intermediate, 96);
}

TEST(Config, Folders) {
  const TempFolder folder;
  EXPECT_THAT(error_of([&] { load_config(folder / "none"); }),
              HasSubstr("expected a model folder"));
  EXPECT_THAT(error_of([&] { load_config(std::string(5000, 'x')); }), HasSubstr("a model folder"));
  EXPECT_THAT(error_of([&] { load_config(folder.path()); }),
              HasSubstr("config.json: no such file"));
  copy_folder(repository() / "tests/golden/random/mamba2", folder);
  EXPECT_EQ(load_config(folder.path()).hidden_size, 64);
  write_file(folder / "hf_quant_config.json", "{}");
  EXPECT_THAT(error_of([&] { load_config(folder.path()); }),
              HasSubstr("hf_quant_config.json: quantised checkpoints are not supported"));
}

}  // namespace
}  // namespace replayssm::testing
