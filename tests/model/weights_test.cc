#include "model/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "core/check.h"
#include "model/folders.h"

namespace replayssm::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

// A matrix whose every element tells its row: row + column / 1024.
StoredTensor numbered(int64_t rows, int64_t columns) {
  std::vector<float> values;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) values.push_back(float(r) + float(c) / 1024);
  }
  return float_tensor({rows, columns}, values);
}

std::vector<int> rows_of(const Tensor& tensor) {
  const std::vector<float> values = tensor.to_floats();
  std::vector<int> rows;
  for (int64_t r = 0; r < tensor.shape[0]; ++r) {
    const float* row = values.data() + r * tensor.shape[1];
    rows.push_back(static_cast<int>(row[0]));
    for (int64_t c = 0; c < tensor.shape[1]; ++c) {
      EXPECT_EQ(row[c], float(rows.back()) + float(c) / 1024);
    }
  }
  return rows;
}

// A folder with one golden checkpoint whose files the test changes.
class Weights : public ::testing::Test {
 protected:
  void start(const std::string& source) {
    copy_folder(repository() / "tests/golden/random" / source, folder_);
    tensors_ = read_safetensors(folder_ / "model.safetensors");
    config_ = read_config(folder_.path());
  }

  ModelWeights load() {
    write_file(folder_ / "config.json", config_.dump());
    write_safetensors(folder_ / "model.safetensors", tensors_);
    return load_weights(folder_.path(), load_config(folder_.path()));
  }

  std::string error() {
    return error_of([&] { load(); });
  }

  TempFolder folder_;
  StoredTensors tensors_;
  json config_;
};

TEST_F(Weights, QueryAndGateRowsAlternateByHead) {
  start("qwen3_5_text");
  tensors_["model.layers.3.self_attn.q_proj.weight"] = numbered(2 * 4 * 32, 64);
  const AttentionWeights w = load().layers[3].attention;
  std::vector<int> query, gate;
  for (int head = 0; head < 4; ++head) {
    for (int i = 0; i < 32; ++i) query.push_back(head * 64 + i), gate.push_back(head * 64 + 32 + i);
  }
  EXPECT_EQ(rows_of(w.q), query);
  EXPECT_EQ(rows_of(w.gate), gate);
}

// 2 key heads, 2 value heads each; all widths 32: a key head has q, k, two v and two z.
TEST_F(Weights, InterleavedProjectionsSeparate) {
  start("qwen3_next");
  tensors_["model.layers.0.linear_attn.in_proj_qkvz.weight"] = numbered(384, 64);
  tensors_["model.layers.0.linear_attn.in_proj_ba.weight"] = numbered(8, 64);
  const GatedDeltaWeights w = load().layers[0].gated_delta;
  std::vector<int> qkv, z;
  const auto add = [](std::vector<int>& rows, int first, int count) {
    for (int i = 0; i < count; ++i) rows.push_back(first + i);
  };
  for (const int head : {0, 192}) add(qkv, head, 32);
  for (const int head : {0, 192}) add(qkv, head + 32, 32);
  for (const int head : {0, 192}) add(qkv, head + 64, 64);
  for (const int head : {0, 192}) add(z, head + 128, 64);
  EXPECT_EQ(rows_of(w.qkv), qkv);
  EXPECT_EQ(rows_of(w.z), z);
  EXPECT_EQ(rows_of(w.beta), (std::vector<int>{0, 1, 4, 5}));
  EXPECT_EQ(rows_of(w.alpha), (std::vector<int>{2, 3, 6, 7}));
}

// Which norms hold w and which hold w - 1.
TEST_F(Weights, NormsThatMeanOnePlus) {
  start("qwen3_5_text");
  for (auto& [name, tensor] : tensors_) {
    if (!name.ends_with("norm.weight")) continue;
    tensor = float_tensor(tensor.shape, std::vector<float>(size_t(tensor.shape[0]), 0.25f));
  }
  const ModelWeights w = load();
  EXPECT_EQ(w.final_norm.to_floats()[0], 1.25f);
  EXPECT_EQ(w.layers[0].mixer_norm.to_floats()[5], 1.25f);
  EXPECT_EQ(w.layers[0].channel_norm.to_floats()[0], 1.25f);
  EXPECT_EQ(w.layers[0].gated_delta.norm.to_floats()[0], 0.25f);
  EXPECT_EQ(w.layers[3].attention.q_norm.to_floats()[31], 1.25f);
  EXPECT_EQ(w.layers[3].attention.k_norm.to_floats()[0], 1.25f);
}

TEST_F(Weights, PlainNorms) {
  start("nemotron_h_moe");
  for (const char* name : {"backbone.norm_f.weight", "backbone.layers.0.norm.weight",
                           "backbone.layers.0.mixer.norm.weight"}) {
    tensors_[name] = float_tensor(tensors_[name].shape,
                                  std::vector<float>(size_t(tensors_[name].shape[0]), 0.25f));
  }
  const ModelWeights w = load();
  EXPECT_EQ(w.final_norm.to_floats()[0], 0.25f);
  EXPECT_EQ(w.layers[0].mixer_norm.to_floats()[0], 0.25f);
  EXPECT_EQ(w.layers[0].mamba2.norm.to_floats()[0], 0.25f);
  EXPECT_FALSE(w.layers[0].channel_norm);
  EXPECT_FALSE(w.layers[1].mixer_norm);
}

TEST_F(Weights, FusedExpertsAreSlicedInPlace) {
  start("qwen3_5_moe_text");
  std::erase_if(tensors_, [](const auto& item) {
    return item.first.starts_with("model.layers.0.mlp.experts.");
  });
  StoredTensor in = numbered(8 * 64, 64), out = numbered(8 * 64, 32);
  in.shape = {8, 64, 64};
  out.shape = {8, 64, 32};
  tensors_["model.layers.0.mlp.experts.gate_up_proj"] = in;
  tensors_["model.layers.0.mlp.experts.down_proj"] = out;
  const ModelWeights w = load();
  const std::vector<MlpWeights>& experts = w.layers[0].moe.experts;
  ASSERT_EQ(experts.size(), 8);
  for (int e = 0; e < 8; ++e) {
    std::vector<int> gate(32), up(32), down(64);
    std::iota(gate.begin(), gate.end(), 64 * e);
    std::iota(up.begin(), up.end(), 64 * e + 32);
    std::iota(down.begin(), down.end(), 64 * e);
    EXPECT_EQ(rows_of(experts[size_t(e)].gate), gate);
    EXPECT_EQ(rows_of(experts[size_t(e)].up), up);
    EXPECT_EQ(rows_of(experts[size_t(e)].down), down);
  }
  EXPECT_EQ(experts[0].up.data, experts[0].gate.data + experts[0].gate.bytes());
}

TEST_F(Weights, MissingUnknownAndMisshapen) {
  start("nemotron_h_moe");
  const StoredTensors good = tensors_;
  const std::string in_proj = "backbone.layers.0.mixer.in_proj.weight";
  tensors_.erase(in_proj);
  EXPECT_THAT(error(), HasSubstr("missing tensor \"" + in_proj + "\"; expected shape [260, 64]"));

  tensors_ = good;
  tensors_[in_proj] = numbered(259, 64);
  EXPECT_THAT(error(), HasSubstr("tensor \"" + in_proj + "\": expected shape [260, 64], got [259"));

  tensors_ = good;
  tensors_["backbone.layers.0.mixer.extra"] = numbered(1, 1);
  EXPECT_THAT(error(), HasSubstr("unknown tensor \"backbone.layers.0.mixer.extra\";"));
  tensors_["backbone.layers.9.norm.weight"] = numbered(1, 1);
  EXPECT_THAT(error(), HasSubstr("unknown tensor"));
  EXPECT_THAT(error(), HasSubstr("and 1 more"));

  tensors_ = good;
  tensors_["backbone.norm_f.weight"] = {"I32", {64}, std::string(256, '\0')};
  EXPECT_THAT(error(), HasSubstr("expected BF16, F16 or F32, got I32"));

  tensors_ = good;
  tensors_.erase("backbone.embeddings.weight");
  EXPECT_THAT(error(), HasSubstr("missing tensor \"backbone.embeddings.weight\" or "));

  tensors_ = good;
  tensors_.erase("lm_head.weight");
  EXPECT_THAT(error(), HasSubstr("missing tensor \"lm_head.weight\""));
}

TEST_F(Weights, PrefixesDoNotMix) {
  start("nemotron_h_moe");
  tensors_["model.layers.0.norm.weight"] = tensors_["backbone.layers.0.norm.weight"];
  EXPECT_THAT(error(), HasSubstr("unknown tensor \"model.layers.0.norm.weight\""));
}

TEST_F(Weights, VisionTensorsOnlyWhereTheyBelong) {
  start("nemotron_h_moe");
  tensors_["model.visual.patch.weight"] = numbered(1, 1);
  EXPECT_THAT(error(), HasSubstr("unknown tensor \"model.visual.patch.weight\""));
}

TEST_F(Weights, QuantisedAreRefusedByName) {
  start("qwen3_5_text");
  const StoredTensors good = tensors_;
  const std::string down = "model.layers.0.mlp.down_proj.weight";
  tensors_[down] = {"F8_E4M3", {64, 96}, std::string(64 * 96, '\0')};
  EXPECT_THAT(error(), HasSubstr('"' + down + "\" (F8_E4M3) belongs to a quantised checkpoint"));
  tensors_[down] = {"U8", {64, 48}, std::string(64 * 48, '\0')};
  EXPECT_THAT(error(), HasSubstr("(U8) belongs to a quantised checkpoint"));
  tensors_ = good;
  for (const char* suffix : {"_scale", "_scale_2", "_scale_inv", "_packed", "_global_scale"}) {
    tensors_ = good;
    tensors_[down + suffix] = float_tensor({1}, {1});
    EXPECT_THAT(error(), HasSubstr(down + suffix + "\" (F32) belongs to a quantised checkpoint"));
  }
}

TEST_F(Weights, TiedHeads) {
  start("mamba2");
  EXPECT_FALSE(load().lm_head);
  tensors_["lm_head.weight"] = tensors_["backbone.embeddings.weight"];
  EXPECT_THAT(load().skipped, ::testing::ElementsAre("lm_head.weight"));
  tensors_["lm_head.weight"].bytes[7] ^= 1;
  EXPECT_THAT(error(), HasSubstr("differs from \"backbone.embeddings.weight\", but tie_word_emb"));
  config_["tie_word_embeddings"] = false;
  EXPECT_TRUE(load().lm_head);
}

TEST_F(Weights, MtpBlockMayBeAbsentButNotPartial) {
  copy_folder(repository() / "models/tiny-qwen3.5", folder_);
  tensors_ = read_safetensors(folder_ / "model.safetensors");
  config_ = read_config(folder_.path());
  ASSERT_EQ(load().mtp.size(), 1);
  EXPECT_TRUE(load().mtp[0].layers[0].attention.gate);
  tensors_.erase("mtp.norm.weight");
  EXPECT_THAT(error(), HasSubstr("missing tensor \"mtp.norm.weight\""));
  std::erase_if(tensors_, [](const auto& item) { return item.first.starts_with("mtp."); });
  EXPECT_EQ(load().mtp.size(), 0);
}

TEST_F(Weights, ANemotronHeadMayBeAbsentButNeitherPartialNorMore) {
  start("nemotron_h_mtp");
  const StoredTensors good = tensors_;
  ASSERT_EQ(load().mtp.size(), 1);
  const ModelWeights weights = load();
  EXPECT_EQ(weights.mtp[0].layers[1].moe.experts.size(), 8);
  EXPECT_TRUE(weights.mtp[0].layers[1].moe.latent_in);
  for (const auto& [name, tensor] : good) {
    if (!name.starts_with("mtp.")) continue;
    tensors_ = good;
    tensors_.erase(name);
    EXPECT_THAT(error(), HasSubstr("missing tensor \"" + name + "\"; expected shape"));
  }
  tensors_ = good;
  tensors_["mtp.layers.1.eh_proj.weight"] = numbered(64, 128);
  EXPECT_THAT(error(), HasSubstr("unknown tensor \"mtp.layers.1.eh_proj.weight\";"));
  tensors_ = good;
  tensors_["mtp.layers.0.eh_proj.weight"] = numbered(64, 64);
  EXPECT_THAT(error(), HasSubstr("expected shape [64, 128], got [64, 64]"));
  tensors_ = good;
  std::erase_if(tensors_, [](const auto& item) { return item.first.starts_with("mtp."); });
  EXPECT_EQ(load().mtp.size(), 0);
  tensors_ = good;
  config_["num_nextn_predict_layers"] = 0;
  EXPECT_EQ(load().mtp.size(), 0);
  EXPECT_EQ(load().skipped.size(), std::ranges::count_if(good, [](const auto& item) {
              return item.first.starts_with("mtp.");
            }));
}

TEST_F(Weights, TruncatedFile) {
  start("mamba2");
  const auto path = folder_ / "model.safetensors";
  const auto size = std::filesystem::file_size(path);
  for (const uintmax_t bytes : {size - 1, size / 2, uintmax_t{100}, uintmax_t{5}, uintmax_t{0}}) {
    std::filesystem::resize_file(path, bytes);
    const std::string message =
        error_of([&] { load_weights(folder_.path(), load_config(folder_.path())); });
    EXPECT_THAT(message, HasSubstr("model.safetensors: ")) << bytes;
    EXPECT_THAT(message, Not(HasSubstr("\n")));
  }
}

// As many tensors as the largest published checkpoint has.
TEST_F(Weights, SeventyFourThousandTensors) {
  start("qwen3_next");
  constexpr int kLayers = 48, kExperts = 512;
  config_["num_hidden_layers"] = kLayers;
  config_["num_experts"] = kExperts;
  config_["hidden_size"] = 2;
  config_["moe_intermediate_size"] = 1;
  config_.erase("layer_types");
  config_["mlp_only_layers"] = json::array();
  StoredTensors all;
  for (const auto& [name, tensor] : tensors_) {
    if (name.find(".experts.") != name.npos) continue;
    StoredTensor small = tensor;
    if (small.shape.back() == 64) small.shape.back() = 2;  // hidden_size
    if (small.shape[0] == 64 &&
        (name.ends_with("o_proj.weight") || name.ends_with("out_proj.weight") ||
         name.ends_with("down_proj.weight"))) {
      small.shape[0] = 2;
    }
    if (name.ends_with("mlp.gate.weight")) small.shape[0] = kExperts;
    int64_t elements = 1;
    for (const int64_t size : small.shape) elements *= size;
    small.bytes.assign(static_cast<size_t>(elements) * 2, '\0');
    if (!name.starts_with("model.layers.")) {
      all[name] = small;
      continue;
    }
    const int kind = name[13] - '0';
    if (kind != 0 && kind != 3) continue;
    for (int layer = kind; layer < kLayers; layer += kind == 3 ? 4 : 1) {
      if (kind == 0 && layer % 4 == 3) continue;
      all["model.layers." + std::to_string(layer) + name.substr(14)] = small;
    }
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int expert = 0; expert < kExperts; ++expert) {
      const std::string at = concat("model.layers.", layer, ".mlp.experts.", expert, ".");
      for (const char* part : {"gate_proj", "up_proj"}) {
        all[at + part + ".weight"] = {"BF16", {1, 2}, std::string(4, '\0')};
      }
      all[at + "down_proj.weight"] = {"BF16", {2, 1}, std::string(4, '\0')};
    }
  }
  ASSERT_GE(all.size(), 74000);
  tensors_ = std::move(all);
  const ModelWeights w = load();
  EXPECT_EQ(list_tensors(w).size(), tensors_.size() + 36 * 2 + 12);  // separated projections
}

}  // namespace
}  // namespace replayssm::testing
