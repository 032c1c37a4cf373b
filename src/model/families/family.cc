#include "model/families/family.h"

#include <array>

namespace replayssm {
namespace {

std::array<std::span<const ModelFamily>, 5> all_families() {
  return {mamba2_families(), nemotron_h_families(), qwen_families(), mamba2_hybrid_families(),
          kimi_families()};
}

const ModelFamily* find(std::string_view ModelFamily::* key, std::string_view value) {
  for (const auto families : all_families()) {
    for (const ModelFamily& family : families) {
      if (family.*key == value) return &family;
    }
  }
  return nullptr;
}

}  // namespace

const ModelFamily* find_family(std::string_view model_type) {
  return find(&ModelFamily::model_type, model_type);
}

const ModelFamily* find_family_of_architecture(std::string_view architecture) {
  return find(&ModelFamily::architecture, architecture);
}

std::string known_model_types() {
  std::string names;
  for (const auto families : all_families()) {
    for (const ModelFamily& family : families) {
      names += (names.empty() ? "" : ", ") + std::string(family.model_type);
    }
  }
  return names;
}

}  // namespace replayssm
