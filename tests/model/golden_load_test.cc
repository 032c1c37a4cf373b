// The checkpoints in the repository load, whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "model/config.h"
#include "model/folders.h"
#include "model/weights.h"

namespace replayssm::testing {
namespace {

struct Case {
  std::string folder;
  // What the configuration describes, worked out by hand from its config.json.
  int64_t layers, mamba2, delta, attention, dense, moe, mtp;
  int64_t conv_channels;
  std::vector<int32_t> eos;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.folder; }

class GoldenLoad : public ::testing::TestWithParam<Case> {};

TEST_P(GoldenLoad, CountsAndSizes) {
  const Case& c = GetParam();
  const auto folder = repository() / c.folder;
  const ModelConfig config = load_config(folder);
  EXPECT_EQ(config.layers.size(), c.layers);
  EXPECT_EQ(config.count(Mixer::kMamba2), c.mamba2);
  EXPECT_EQ(config.count(Mixer::kGatedDelta) + config.count(Mixer::kKimiDelta), c.delta);
  EXPECT_EQ(config.recurrent_layers(), c.mamba2 + c.delta);
  EXPECT_EQ(config.attention_layers(), c.attention);
  EXPECT_EQ(std::ranges::count(config.layers, ChannelMix::kDense, &LayerConfig::channel_mix),
            c.dense);
  EXPECT_EQ(std::ranges::count(config.layers, ChannelMix::kMoe, &LayerConfig::channel_mix), c.moe);
  EXPECT_EQ(c.mamba2                          ? config.mamba2.conv_channels()
            : config.count(Mixer::kKimiDelta) ? config.kimi_delta.conv_channels()
                                              : config.gated_delta.conv_channels(),
            c.conv_channels);
  EXPECT_EQ(config.eos_ids, c.eos);

  const ModelWeights weights = load_weights(folder, config);
  EXPECT_EQ(weights.layers.size(), c.layers);
  EXPECT_EQ(weights.mtp.size(), c.mtp);
  EXPECT_TRUE(weights.skipped.empty());
}

// No element of the files is lost or used twice.
TEST_P(GoldenLoad, EveryElementOnce) {
  const auto folder = repository() / GetParam().folder;
  int64_t stored = 0, loaded = 0;
  for (const auto& [name, tensor] : read_safetensors(folder / "model.safetensors")) {
    int64_t elements = 1;
    for (const int64_t size : tensor.shape) elements *= size;
    stored += elements;
  }
  const ModelWeights weights = load_weights(folder, load_config(folder));
  for (const auto& [name, tensor] : list_tensors(weights)) loaded += tensor.elements();
  EXPECT_EQ(loaded, stored);
}

const std::string kRandom = "tests/golden/random/";

INSTANTIATE_TEST_SUITE_P(
    , GoldenLoad,
    ::testing::Values(
        Case{kRandom + "bamba", 3, 2, 0, 1, 3, 0, 0, 128 + 2 * 32, {2}},
        Case{kRandom + "falcon_h1", 2, 2, 0, 2, 2, 0, 0, 128 + 2 * 32, {2}},
        Case{kRandom + "falcon_h1_scaled", 2, 2, 0, 2, 2, 0, 0, 128 + 4 * 32, {2}},
        Case{kRandom + "granitemoehybrid_dense_rope", 3, 2, 0, 1, 3, 0, 0, 128 + 2 * 32, {2}},
        Case{kRandom + "kimi_linear_groups", 4, 0, 2, 2, 1, 3, 0, 3 * 96, {1}},
        Case{kRandom + "granitemoehybrid", 3, 2, 0, 1, 0, 3, 0, 128 + 2 * 32, {2}},
        Case{kRandom + "kimi_linear", 4, 0, 3, 1, 1, 3, 0, 3 * 128, {1}},
        Case{kRandom + "mamba2", 3, 3, 0, 0, 0, 0, 0, 128 + 2 * 2 * 32, {1}},
        Case{kRandom + "nemotron_h_moe", 6, 2, 0, 1, 1, 2, 0, 64 + 2 * 2 * 32, {1}},
        Case{kRandom + "nemotron_h_latent_moe_headdim80", 6, 2, 0, 1, 1, 2, 0, 240 + 2 * 64, {1}},
        Case{kRandom + "nemotron_h_mtp", 6, 2, 0, 1, 1, 2, 1, 240 + 2 * 64, {1}},
        Case{kRandom + "qwen3_5_text", 4, 0, 3, 1, 4, 0, 0, 2 * 64 + 6 * 48, {}},
        Case{kRandom + "qwen3_5_moe_text", 4, 0, 3, 1, 0, 4, 0, 2 * 64 + 128, {}},
        Case{kRandom + "qwen3_next", 4, 0, 3, 1, 0, 4, 0, 2 * 64 + 128, {}},
        Case{"models/tiny-nemotron-h", 14, 6, 0, 2, 6, 0, 0, 384 + 2 * 2 * 128, {0, 2}},
        Case{"models/tiny-qwen3.5", 8, 0, 6, 2, 8, 0, 1, 2 * 256 + 512, {0, 2}}));

// The fields that forward passes read, of one checkpoint per family, by hand.
TEST(GoldenFields, NemotronFields) {
  const ModelConfig c = load_config(repository() / (kRandom + "nemotron_h_latent_moe_headdim80"));
  EXPECT_EQ(c.model_type, "nemotron_h");
  EXPECT_EQ(c.mamba2.heads, 3);
  EXPECT_EQ(c.mamba2.head_dim, 80);
  EXPECT_EQ(c.mamba2.norm_groups, 1);
  EXPECT_EQ(c.mamba2.dt_max, std::numeric_limits<float>::infinity());
  EXPECT_EQ(c.attention.head_dim, 16);
  EXPECT_EQ(c.attention.scale, 0.25f);
  EXPECT_EQ(c.attention.rotary_dim, 0);
  EXPECT_FALSE(c.attention.qk_norm || c.attention.output_gate || c.attention.bias);
  EXPECT_EQ(c.activation, MlpActivation::kReluSquared);
  EXPECT_EQ(c.moe.experts, 8);
  EXPECT_EQ(c.moe.top_k, 3);
  EXPECT_EQ(c.moe.latent, 32);
  EXPECT_EQ(c.moe.shared_intermediate, 64);
  EXPECT_EQ(c.moe.scale, 2.5f);
  EXPECT_TRUE(c.moe.sigmoid_scores && c.moe.correction_bias && c.moe.renormalize);
  EXPECT_FALSE(c.moe.shared_gate || c.tied_embeddings);
  EXPECT_EQ(c.bos_id, 0);
}

TEST(GoldenFields, BambaFields) {
  const ModelConfig c = load_config(repository() / (kRandom + "bamba"));
  EXPECT_EQ(c.layers[1].mixer, Mixer::kAttention);
  EXPECT_EQ(c.layers[1].second, Mixer::kNone);
  EXPECT_EQ(c.mamba2.heads, 8);
  EXPECT_EQ(c.mamba2.head_dim, 16);
  EXPECT_EQ(c.mamba2.norm_groups, 1);
  EXPECT_TRUE(c.mamba2.gate_first && c.mamba2.conv_bias);
  EXPECT_EQ(c.attention.head_dim, 16);
  EXPECT_EQ(c.attention.rotary_dim, 8);
  EXPECT_EQ(c.attention.rope_theta, 1e4);
  EXPECT_EQ(c.intermediate, 96);
  EXPECT_EQ(c.bos_id, 1);
  EXPECT_EQ(c.residual_scale * c.embedding_scale * c.logit_scale, 1);
}

TEST(GoldenFields, FalconFields) {
  const ModelConfig c = load_config(repository() / (kRandom + "falcon_h1"));
  for (const LayerConfig& layer : c.layers) {
    EXPECT_EQ(layer.mixer, Mixer::kMamba2);
    EXPECT_EQ(layer.second, Mixer::kAttention);
    EXPECT_EQ(layer.channel_mix, ChannelMix::kDense);
  }
  EXPECT_EQ(c.recurrent_layers(), 2);
  EXPECT_EQ(c.attention_layers(), 2);
  EXPECT_EQ(c.mamba2.norm_groups, 0);
  EXPECT_EQ(c.attention.rotary_dim, 16);
  EXPECT_EQ(c.attention.scale, 0.25f);
}

TEST(GoldenFields, GraniteFields) {
  const ModelConfig c = load_config(repository() / (kRandom + "granitemoehybrid"));
  EXPECT_EQ(c.embedding_scale, 3);
  EXPECT_EQ(c.residual_scale, 0.7f);
  EXPECT_EQ(c.logit_scale, 0.5f);
  EXPECT_EQ(c.attention.scale, 0.2f);
  EXPECT_EQ(c.attention.rotary_dim, 0);
  EXPECT_EQ(c.norm_eps, 1e-6f);
  EXPECT_EQ(c.moe.experts, 4);
  EXPECT_EQ(c.moe.top_k, 2);
  EXPECT_EQ(c.moe.intermediate, 96);
  EXPECT_EQ(c.moe.shared_intermediate, 48);
  EXPECT_TRUE(c.moe.renormalize);
  EXPECT_FALSE(c.moe.sigmoid_scores || c.moe.shared_gate || c.moe.correction_bias);
}

TEST(GoldenFields, KimiFields) {
  const ModelConfig c = load_config(repository() / (kRandom + "kimi_linear"));
  EXPECT_EQ(c.layers[2].mixer, Mixer::kKimiDelta);
  EXPECT_EQ(c.layers[3].mixer, Mixer::kLatentAttention);
  EXPECT_EQ(c.layers[0].channel_mix, ChannelMix::kDense);
  EXPECT_EQ(c.layers[1].channel_mix, ChannelMix::kMoe);
  EXPECT_EQ(c.kimi_delta.heads, 4);
  EXPECT_EQ(c.kimi_delta.head_dim, 32);
  EXPECT_EQ(c.kimi_delta.gate_lower_bound, 0);
  EXPECT_EQ(c.kimi_delta.output_gate, GateKind::kSigmoid);
  EXPECT_EQ(c.latent_attention.heads, 4);
  EXPECT_EQ(c.latent_attention.cached(), 32 + 16);
  EXPECT_EQ(c.latent_attention.query_dim(), 32 + 16);
  EXPECT_EQ(c.latent_attention.value_dim, 32);
  EXPECT_FLOAT_EQ(c.latent_attention.scale, 1 / std::sqrt(48.0f));
  EXPECT_EQ(c.norm_eps, 1e-5f);
  EXPECT_EQ(c.latent_attention.norm_eps, 1e-6f);
  EXPECT_EQ(c.max_positions, 512);
  EXPECT_EQ(c.moe.experts, 8);
  EXPECT_EQ(c.moe.top_k, 3);
  EXPECT_EQ(c.moe.shared_intermediate, 32);
  EXPECT_EQ(c.moe.scale, 2.446f);
  EXPECT_TRUE(c.moe.sigmoid_scores && c.moe.correction_bias && c.moe.renormalize);
}

TEST(GoldenFields, QwenFields) {
  const ModelConfig c = load_config(repository() / (kRandom + "qwen3_5_moe_text"));
  EXPECT_EQ(c.gated_delta.key_heads, 2);
  EXPECT_EQ(c.gated_delta.value_heads, 4);
  EXPECT_EQ(c.gated_delta.output_gate, GateKind::kSilu);
  EXPECT_EQ(c.attention.rotary_dim, 8);
  EXPECT_EQ(c.attention.rope_theta, 1e7);
  EXPECT_TRUE(c.attention.qk_norm && c.attention.output_gate);
  EXPECT_TRUE(c.moe.shared_gate && c.moe.renormalize);
  EXPECT_FALSE(c.moe.sigmoid_scores || c.moe.correction_bias);
  EXPECT_EQ(c.norm_eps, 1e-6f);
  EXPECT_EQ(c.max_positions, 512);
  EXPECT_EQ(c.bos_id, -1);
  EXPECT_TRUE(c.eos_ids.empty());
}

TEST(GoldenFields, Mamba2Fields) {
  const ModelConfig c = load_config(repository() / (kRandom + "mamba2"));
  EXPECT_EQ(c.mamba2.groups, 2);
  EXPECT_EQ(c.mamba2.norm_groups, 1);
  EXPECT_EQ(c.mamba2.state_dim, 32);
  EXPECT_EQ(c.vocab_size, 256);
  EXPECT_TRUE(c.tied_embeddings && c.mamba2.conv_bias);
  EXPECT_FALSE(c.mamba2.projection_bias);
}

}  // namespace
}  // namespace replayssm::testing
