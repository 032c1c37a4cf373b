// Loading and running whole models in tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "engine/rows.h"
#include "model/model.h"

namespace replayssm::testing {

using nlohmann::json;

inline std::filesystem::path repository() { return REPLAYSSM_SOURCE_DIR; }

inline std::string read_text(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

inline json read_json(const std::filesystem::path& path) { return json::parse(read_text(path)); }

// What a model runs on: "cpu" or "cuda".
using Device = std::string;

// Why it cannot; empty where it can.
inline std::string obstacle(const std::filesystem::path& folder, const Device& device) {
  return device == "cuda" ? cuda_obstacle(load_config(folder)) : std::string();
}

inline std::unique_ptr<Model> load_model(const ModelSource& source, DType dtype,
                                         const Device& device, ThreadPool& pool) {
  return device == "cuda" ? load_cuda_model(source, dtype) : load_cpu_model(source, dtype, pool);
}

using ModelAndDevice = std::tuple<const char* /* model */, Device>;

inline std::string test_name(const ::testing::TestParamInfo<ModelAndDevice>& info) {
  std::string name = std::get<0>(info.param) + ("_" + std::get<1>(info.param));
  std::ranges::replace_if(name, [](char c) { return c == '-' || c == '.'; }, '_');
  return name;
}

// Logits of every position of a prompt: [tokens, vocab].
inline std::vector<float> prompt_logits(Model& model, const std::vector<int32_t>& ids) {
  const auto count = static_cast<int64_t>(ids.size());
  Rows rows(model, {.rows = 1, .context = count, .max_logits = count});
  std::vector<int32_t> wanted(ids.size());
  for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = static_cast<int32_t>(i);
  const auto logits = rows.prefill(std::vector<RowTokens>{{0, ids}}, wanted);
  return {logits.begin(), logits.end()};
}

}  // namespace replayssm::testing
