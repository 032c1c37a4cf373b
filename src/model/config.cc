#include "model/config.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "core/check.h"
#include "core/text_file.h"
#include "model/config_parser.h"
#include "model/families/family.h"
#include "model/json_text.h"
#include "model/mapped_file.h"

namespace replayssm {
namespace {

using nlohmann::json;

void refuse_quantised(const ConfigReader& reader) {
  for (const char* key : {"quantization_config", "compression_config"}) {
    const json* found = reader.find({key});
    if (!found) continue;
    std::string method;
    for (const char* name : {"quant_method", "quant_algo"}) {
      if (found->is_object() && found->contains(name)) method += " " + describe((*found)[name]);
    }
    fail(reader.file(), ": ", key, ": quantised checkpoints are not supported, got",
         method.empty() ? " " + describe(*found) : method);
  }
}

// model_type decides; without it `architectures`, then the original mamba2 dialect's keys.
const ModelFamily& family_of(const ConfigReader& reader) {
  const std::string model_type = reader.text({"model_type"}, "");
  if (!model_type.empty()) {
    if (const ModelFamily* family = find_family(model_type)) return *family;
    fail(reader.file(), ": model_type: unknown architecture ", in_quotes(model_type),
         "; expected one of ", known_model_types());
  }
  std::string unknown;
  if (const json* architectures = reader.list({"architectures"})) {
    for (const json& name : *architectures) {
      if (!name.is_string()) reader.refuse("architectures", "a list of names", describe(name));
      const ModelFamily* family = find_family_of_architecture(name.get_ref<const std::string&>());
      if (family) return *family;
      unknown = name.get<std::string>();
    }
  }
  if (!unknown.empty()) {
    fail(reader.file(), ": architectures: unknown architecture ", in_quotes(unknown),
         "; expected model_type to be one of ", known_model_types());
  }
  if (reader.has("d_model") && reader.has("ssm_cfg")) return *find_family("mamba2");
  reader.refuse("model_type", known_model_types(), "nothing");
}

// Adds the token ids under `key`: one, or a list.
void add_token_ids(const ConfigReader& reader, const char* key, int64_t vocab_size,
                   std::vector<int32_t>& ids) {
  const auto value = reader.raw().find(key);
  if (value == reader.raw().end() || value->is_null()) return;
  const auto add = [&](const json& id) {
    const bool valid = id.is_number_unsigned() && id.get<uint64_t>() < uint64_t(vocab_size);
    if (!valid) {
      reader.refuse(key, concat("token ids from 0 to ", vocab_size - 1), describe(id));
    }
    const auto token = id.get<int32_t>();
    if (std::ranges::count(ids, token) == 0) ids.push_back(token);
  };
  if (!value->is_array()) return add(*value);
  for (const json& id : *value) add(id);
}

// What the files say replaces the family's defaults.
void read_token_ids(std::span<const ConfigReader> readers, ModelConfig& config) {
  std::vector<int32_t> bos, eos;
  for (const ConfigReader& reader : readers) {
    add_token_ids(reader, "eos_token_id", config.vocab_size, eos);
    add_token_ids(reader, "bos_token_id", config.vocab_size, bos);
  }
  if (!eos.empty()) config.eos_ids = eos;
  if (!bos.empty()) config.bos_id = bos.front();
}

}  // namespace

int64_t ModelConfig::count(Mixer mixer) const {
  return std::ranges::count_if(layers, [&](const LayerConfig& layer) {
    return layer.mixer == mixer || layer.second == mixer;
  });
}

bool ModelConfig::has(ChannelMix mix) const {
  return std::ranges::count(layers, mix, &LayerConfig::channel_mix) > 0;
}

int64_t ModelConfig::recurrent_layers() const {
  return count(Mixer::kMamba2) + count(Mixer::kGatedDelta) + count(Mixer::kKimiDelta);
}

int64_t ModelConfig::attention_layers() const {
  return count(Mixer::kAttention) + count(Mixer::kLatentAttention);
}

ModelConfig parse_config(const ConfigText& config_text,
                         const std::optional<ConfigText>& generation_text) {
  const json root = parse_json_object(with_tagged_floats(config_text.text), config_text.file);
  const ConfigReader reader(root, config_text.file);
  const ModelFamily& family = family_of(reader);
  refuse_quantised(reader);
  std::vector<ConfigReader> readers{reader};
  std::optional<ConfigReader> text = reader.object("text_config");
  if (text) {
    refuse_quantised(*text);
    readers.emplace_back(text->raw(), text->file(), "text_config.");
  }

  ModelConfig config;
  config.model_type = family.model_type;
  family.read_config(reader, config);

  json generation;
  if (generation_text) {
    generation =
        parse_json_object(with_tagged_floats(generation_text->text), generation_text->file);
    readers.emplace_back(generation, generation_text->file);
  }
  read_token_ids(readers, config);
  return config;
}

ModelConfig load_config(const std::filesystem::path& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    fail(folder.string(), ": expected a model folder, got ",
         file_exists(folder) ? "a file" : "nothing");
  }
  const std::filesystem::path config = folder / "config.json";
  const std::filesystem::path generation = folder / "generation_config.json";
  const std::filesystem::path quantisation = folder / "hf_quant_config.json";
  const std::string config_text = read_text_file(config);
  if (file_exists(quantisation)) {
    fail(quantisation.string(), ": quantised checkpoints are not supported");
  }
  if (!file_exists(generation)) {
    return parse_config({config.string(), config_text}, std::nullopt);
  }
  const std::string generation_text = read_text_file(generation);
  return parse_config({config.string(), config_text},
                      ConfigText{generation.string(), generation_text});
}

}  // namespace replayssm
