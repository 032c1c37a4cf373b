#include "model/weights.h"

#include "core/check.h"
#include "model/families/family.h"
#include "model/safetensors.h"
#include "model/weight_reader.h"

namespace replayssm {

namespace {

ModelWeights read_all(WeightReader& reader, const ModelConfig& config) {
  const ModelFamily* family = find_family(config.model_type);
  REPLAYSSM_CHECK(family, "model_type ", config.model_type);
  ModelWeights weights;
  family->read_weights(reader, config, weights);
  weights.skipped = reader.finish();
  return weights;
}

}  // namespace

ModelWeights load_weights(const std::filesystem::path& folder, const ModelConfig& config) {
  const Checkpoint checkpoint(folder);
  WeightReader reader(checkpoint);
  return read_all(reader, config);
}

ModelWeights dummy_weights(const ModelConfig& config) {
  WeightReader reader;
  return read_all(reader, config);
}

}  // namespace replayssm
