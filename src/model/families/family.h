// The model families that load: each one file that knows its configuration keys and tensor names.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "model/config.h"
#include "model/config_reader.h"
#include "model/weight_reader.h"
#include "model/weights.h"

namespace replayssm {

// One value of config.json's model_type, with the architecture that stands for it where model_type
// is missing.
struct ModelFamily {
  std::string_view model_type, architecture;

  // Fills everything but model_type; of the token ids only the family's defaults.
  void (*read_config)(const ConfigReader& reader, ModelConfig& config);
  void (*read_weights)(WeightReader& reader, const ModelConfig& config, ModelWeights& weights);
};

std::span<const ModelFamily> kimi_families();
std::span<const ModelFamily> mamba2_families();
std::span<const ModelFamily> mamba2_hybrid_families();
std::span<const ModelFamily> nemotron_h_families();
std::span<const ModelFamily> qwen_families();

// Null when unknown.
const ModelFamily* find_family(std::string_view model_type);
const ModelFamily* find_family_of_architecture(std::string_view architecture);
std::string known_model_types();  // for messages

}  // namespace replayssm
