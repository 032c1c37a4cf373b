#include "model/folders.h"

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "core/check.h"

namespace replayssm::testing {
namespace {

using nlohmann::json;

using Tensors = std::map<std::string, Tensor>;

void add(Tensors& all, const std::string& name, const Tensor& tensor) {
  if (tensor) all.emplace(name, tensor);
}

void add_mlp(Tensors& all, const std::string& at, const MlpWeights& w) {
  add(all, at + "gate", w.gate);
  add(all, at + "up", w.up);
  add(all, at + "down", w.down);
  add(all, at + "gate_bias", w.gate_bias);
  add(all, at + "up_bias", w.up_bias);
  add(all, at + "down_bias", w.down_bias);
}

void add_mixers(Tensors& all, const std::string& at, const LayerWeights& w) {
  add(all, at + "mamba2.in_proj", w.mamba2.in_proj);
  add(all, at + "mamba2.in_proj_bias", w.mamba2.in_proj_bias);
  add(all, at + "mamba2.conv_weight", w.mamba2.conv_weight);
  add(all, at + "mamba2.conv_bias", w.mamba2.conv_bias);
  add(all, at + "mamba2.dt_bias", w.mamba2.dt_bias);
  add(all, at + "mamba2.a_log", w.mamba2.a_log);
  add(all, at + "mamba2.d", w.mamba2.d);
  add(all, at + "mamba2.norm", w.mamba2.norm);
  add(all, at + "mamba2.out_proj", w.mamba2.out_proj);
  add(all, at + "mamba2.out_proj_bias", w.mamba2.out_proj_bias);
  add(all, at + "gdn.qkv", w.gated_delta.qkv);
  add(all, at + "gdn.z", w.gated_delta.z);
  add(all, at + "gdn.beta", w.gated_delta.beta);
  add(all, at + "gdn.alpha", w.gated_delta.alpha);
  add(all, at + "gdn.conv_weight", w.gated_delta.conv_weight);
  add(all, at + "gdn.dt_bias", w.gated_delta.dt_bias);
  add(all, at + "gdn.a_log", w.gated_delta.a_log);
  add(all, at + "gdn.norm", w.gated_delta.norm);
  add(all, at + "gdn.out_proj", w.gated_delta.out_proj);
  add(all, at + "kda.q", w.kimi_delta.q);
  add(all, at + "kda.k", w.kimi_delta.k);
  add(all, at + "kda.v", w.kimi_delta.v);
  add(all, at + "kda.beta", w.kimi_delta.beta);
  add(all, at + "kda.decay_down", w.kimi_delta.decay_down);
  add(all, at + "kda.decay_up", w.kimi_delta.decay_up);
  add(all, at + "kda.gate_down", w.kimi_delta.gate_down);
  add(all, at + "kda.gate_up", w.kimi_delta.gate_up);
  add(all, at + "kda.q_conv", w.kimi_delta.q_conv);
  add(all, at + "kda.k_conv", w.kimi_delta.k_conv);
  add(all, at + "kda.v_conv", w.kimi_delta.v_conv);
  add(all, at + "kda.dt_bias", w.kimi_delta.dt_bias);
  add(all, at + "kda.a_log", w.kimi_delta.a_log);
  add(all, at + "kda.norm", w.kimi_delta.norm);
  add(all, at + "kda.out_proj", w.kimi_delta.out_proj);
  add(all, at + "latent.q", w.latent_attention.q);
  add(all, at + "latent.latent", w.latent_attention.latent);
  add(all, at + "latent.norm", w.latent_attention.norm);
  add(all, at + "latent.key_up", w.latent_attention.key_up);
  add(all, at + "latent.value_up", w.latent_attention.value_up);
  add(all, at + "latent.o", w.latent_attention.o);
  add(all, at + "attention.q", w.attention.q);
  add(all, at + "attention.k", w.attention.k);
  add(all, at + "attention.v", w.attention.v);
  add(all, at + "attention.gate", w.attention.gate);
  add(all, at + "attention.q_norm", w.attention.q_norm);
  add(all, at + "attention.k_norm", w.attention.k_norm);
  add(all, at + "attention.o", w.attention.o);
  add(all, at + "attention.q_bias", w.attention.q_bias);
  add(all, at + "attention.k_bias", w.attention.k_bias);
  add(all, at + "attention.v_bias", w.attention.v_bias);
  add(all, at + "attention.o_bias", w.attention.o_bias);
}

void add_layer(Tensors& all, const std::string& at, const LayerWeights& w) {
  add(all, at + "mixer_norm", w.mixer_norm);
  add(all, at + "channel_norm", w.channel_norm);
  add_mixers(all, at, w);
  add_mlp(all, at + "mlp.", w.mlp);
  add(all, at + "moe.router", w.moe.router);
  add(all, at + "moe.correction_bias", w.moe.correction_bias);
  for (size_t i = 0; i < w.moe.experts.size(); ++i) {
    add_mlp(all, concat(at, "moe.experts.", i, "."), w.moe.experts[i]);
  }
  add_mlp(all, at + "moe.shared.", w.moe.shared);
  add(all, at + "moe.shared_gate", w.moe.shared_gate);
  add(all, at + "moe.latent_in", w.moe.latent_in);
  add(all, at + "moe.latent_out", w.moe.latent_out);
}

}  // namespace

TempFolder::TempFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "replayssm_XXXXXX").string();
  if (!mkdtemp(name.data())) fail(name, ": cannot be made");
  path_ = name;
}

std::filesystem::path repository() { return REPLAYSSM_SOURCE_DIR; }

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(path.string(), ": cannot be read");
  return (std::ostringstream() << in.rdbuf()).str();
}

void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string safetensors_bytes(const std::string& header, const std::string& data) {
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
  return length + header + data;
}

void write_safetensors(const std::filesystem::path& path, const StoredTensors& tensors) {
  json header = json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  write_file(path, safetensors_bytes(text, data));
}

StoredTensors read_safetensors(const std::filesystem::path& path) {
  const std::string file = read_file(path);
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  StoredTensors tensors;
  const json header = json::parse(file.substr(8, length));
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    tensors[name] = {entry["dtype"], entry["shape"], file.substr(8 + length + begin, end - begin)};
  }
  return tensors;
}

StoredTensor float_tensor(std::vector<int64_t> shape, const std::vector<float>& values) {
  return {"F32", std::move(shape),
          std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float))};
}

void copy_folder(const std::filesystem::path& from, const TempFolder& to) {
  using Options = std::filesystem::copy_options;
  std::filesystem::copy(from, to.path(), Options::overwrite_existing | Options::recursive);
}

nlohmann::json read_config(const std::filesystem::path& folder) {
  return json::parse(read_file(folder / "config.json"));
}

std::map<std::string, Tensor> list_tensors(const ModelWeights& weights) {
  Tensors all;
  add(all, "embedding", weights.embedding);
  add(all, "final_norm", weights.final_norm);
  add(all, "lm_head", weights.lm_head);
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    add_layer(all, concat("layers.", i, "."), weights.layers[i]);
  }
  for (size_t i = 0; i < weights.mtp.size(); ++i) {
    const std::string at = concat("mtp.", i, ".");
    add(all, at + "fc", weights.mtp[i].fc);
    add(all, at + "embedding_norm", weights.mtp[i].embedding_norm);
    add(all, at + "hidden_norm", weights.mtp[i].hidden_norm);
    add(all, at + "norm", weights.mtp[i].norm);
    for (size_t j = 0; j < weights.mtp[i].layers.size(); ++j)
      add_layer(all, concat(at, "layers.", j, "."), weights.mtp[i].layers[j]);
  }
  return all;
}

}  // namespace replayssm::testing
