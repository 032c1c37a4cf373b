#include "model/dummy_weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "model/tensor_ops.h"
#include "model/weights.h"

namespace replayssm {
namespace {

template <class... Tensors>
int64_t sum_of(const Tensors&... tensors) {
  return (int64_t{0} + ... + (tensors ? tensors.elements() : 0));
}

int64_t elements(const Mamba2Weights& w) {
  return sum_of(w.in_proj, w.in_proj_bias, w.conv_weight, w.conv_bias, w.dt_bias, w.a_log, w.d,
                w.norm, w.out_proj, w.out_proj_bias);
}
int64_t elements(const GatedDeltaWeights& w) {
  return sum_of(w.qkv, w.z, w.beta, w.alpha, w.conv_weight, w.dt_bias, w.a_log, w.norm, w.out_proj);
}
int64_t elements(const KimiDeltaWeights& w) {
  return sum_of(w.q, w.k, w.v, w.beta, w.decay_down, w.decay_up, w.gate_down, w.gate_up, w.q_conv,
                w.k_conv, w.v_conv, w.dt_bias, w.a_log, w.norm, w.out_proj);
}
int64_t elements(const AttentionWeights& w) {
  return sum_of(w.q, w.k, w.v, w.gate, w.q_norm, w.k_norm, w.o, w.q_bias, w.k_bias, w.v_bias,
                w.o_bias);
}
int64_t elements(const LatentAttentionWeights& w) {
  return sum_of(w.q, w.latent, w.norm, w.key_up, w.value_up, w.o);
}
int64_t elements(const MlpWeights& w) {
  return sum_of(w.gate, w.up, w.down, w.gate_bias, w.up_bias, w.down_bias);
}
int64_t elements(const MoeWeights& w) {
  int64_t sum = sum_of(w.router, w.correction_bias, w.shared_gate, w.latent_in, w.latent_out) +
                elements(w.shared);
  for (const MlpWeights& expert : w.experts) sum += elements(expert);
  return sum;
}
int64_t elements(const ModelWeights& weights) {
  int64_t sum = sum_of(weights.embedding, weights.final_norm, weights.lm_head);
  for (const LayerWeights& w : weights.layers) {
    sum += sum_of(w.mixer_norm, w.channel_norm) + elements(w.mamba2) + elements(w.gated_delta) +
           elements(w.kimi_delta) + elements(w.attention) + elements(w.latent_attention) +
           elements(w.mlp) + elements(w.moe);
  }
  return sum;
}

ModelConfig shape(const std::string& name) {
  return load_config(std::filesystem::path(REPLAYSSM_SOURCE_DIR) / "models/shapes" / name);
}

// The bundled shapes have as many parameters as the models that they are named after.
TEST(DummyWeights, ShapesAreThoseOfThePublishedModels) {
  const std::pair<const char*, int64_t> models[] = {
      {"NVIDIA-Nemotron-3-Nano-4B-BF16", 3'973'556'832},
      {"NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31'577'940'288},
      {"Qwen3.5-0.8B", 752'393'024},
      {"Kimi-Linear-48B-A3B-Instruct", 49'122'681'728},
      {"mamba2-2.7b", 2'702'599'680},
  };
  for (const auto& [name, parameters] : models)
    EXPECT_EQ(elements(dummy_weights(shape(name))), parameters) << name;
}

TEST(DummyWeights, LargerShapesAreThePublishedOnes) {
  const ModelConfig small = shape("Qwen3.5-4B"), large = shape("Qwen3.5-9B");
  EXPECT_EQ(small.count(Mixer::kGatedDelta), 24);
  EXPECT_EQ(small.count(Mixer::kAttention), 8);
  EXPECT_EQ(small.hidden_size, 2560);
  EXPECT_TRUE(small.tied_embeddings);
  EXPECT_EQ(large.hidden_size, 4096);
  EXPECT_EQ(large.intermediate, 12288);
  EXPECT_FALSE(large.tied_embeddings);
  EXPECT_EQ(large.gated_delta.value_heads, 32);
}

TEST(DummyWeights, AreWhatTheirNamesSayAndAlwaysTheSame) {
  const auto vector = [&](const char* name) { return dummy_tensor(name, {64}).to_floats(); };
  EXPECT_EQ(vector("layers.0.norm.weight"), std::vector<float>(64, 1));
  EXPECT_EQ(vector("layers.0.mixer.D"), std::vector<float>(64, 1));
  EXPECT_EQ(vector("layers.0.conv1d.bias"), std::vector<float>(64, 0));
  for (const float a : vector("layers.0.mixer.A_log")) EXPECT_TRUE(a >= 0 && a < 2.78f) << a;
  for (const float b : vector("layers.0.mixer.dt_bias")) {
    const double step = std::log1p(std::exp(static_cast<double>(b)));
    EXPECT_TRUE(step > 0.00099 && step < 0.101) << step;
  }
  const auto matrix = dummy_tensor("layers.0.in_proj.weight", {300, 200}).to_floats();
  EXPECT_EQ(matrix, dummy_tensor("layers.0.in_proj.weight", {300, 200}).to_floats());
  EXPECT_NE(matrix, dummy_tensor("layers.1.in_proj.weight", {300, 200}).to_floats());
  double sum = 0, squares = 0;
  for (const float w : matrix) {
    sum += w;
    squares += w * w;
  }
  const auto count = static_cast<double>(matrix.size());
  EXPECT_NEAR(sum / count, 0, 4 * 0.02 / std::sqrt(count));
  EXPECT_NEAR(std::sqrt(squares / count), 0.02, 1e-3);
}

// Nothing is made before it is asked for, and then the same, whichever way.
TEST(DummyWeights, MatricesAreMadeWhereTheyAreNeeded) {
  const Tensor matrix = dummy_tensor("layers.0.in_proj.weight", {30, 20});
  EXPECT_TRUE(matrix);
  EXPECT_EQ(matrix.data, nullptr);
  const Tensor there = matrix.on_host();
  EXPECT_EQ(there.to_floats(), matrix.to_floats());
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const auto bytes = static_cast<size_t>(matrix.elements() * dtype_bytes(dtype));
    std::vector<std::byte> made(bytes), copied(bytes);
    write_tensor(matrix, dtype, made.data(), host_memory());
    write_tensor(there, dtype, copied.data(), host_memory());
    EXPECT_EQ(made, copied) << dtype_name(dtype);
  }
  const RowRange rows[] = {{20, 5}, {0, 3}, {29, 1}};
  const Tensor gathered = gather_rows(matrix, rows);
  EXPECT_EQ(gathered.data, nullptr);
  EXPECT_EQ(gathered.to_floats(), gather_rows(there, rows).to_floats());
  const RowRange of_those[] = {{4, 3}};
  EXPECT_EQ(gather_rows(gathered, of_those).to_floats(),
            gather_rows(gathered.on_host(), of_those).to_floats());
  EXPECT_EQ(gather_columns(matrix, {3, 9}).to_floats(), gather_columns(there, {3, 9}).to_floats());
}

}  // namespace
}  // namespace replayssm
