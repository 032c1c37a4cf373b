// What every command does first: find the model and load it.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cli/options.h"
#include "core/thread_pool.h"
#include "engine/engine.h"
#include "model/model.h"

namespace replayssm::cli {

// The folder that MODEL names: itself, or a bundled model's. Throws Error for a model or a device
// that is not there.
std::filesystem::path find_model(const ModelOptions& options);

// What to call it in results.
std::string model_name(const std::filesystem::path& folder);

struct LoadedModel {
  std::unique_ptr<ThreadPool> threads;
  std::unique_ptr<Model> model;
  std::unique_ptr<Model> draft_model;
};
// With all that a way of drafting needs.
LoadedModel load_model(const std::filesystem::path& folder, const ModelOptions& options,
                       const std::optional<SpeculativeConfig>& speculation);
LoadedModel load_model(const std::filesystem::path& folder, const ModelOptions& options);
LoadedModel load_model(const std::filesystem::path& folder, const DecodingOptions& options);

// Of an engine on that model, drafts included.
EngineOptions engine_options(const DecodingOptions& options, const LoadedModel& loaded);

// The recurrent state's type: as asked for, or as the model's files recommend.
DType state_dtype(const StateOptions& options, const ModelConfig& config);

int64_t machine_memory();  // bytes

// Throws Error for an id that the model does not have; `where` names the flag or file.
void check_ids(const std::vector<int32_t>& ids, const ModelConfig& config,
               const std::string& where);

// The whole of a file, or of standard input for "-". Throws Error.
std::string read_text(const std::string& path, const std::string& flag);

// Writes to standard output at once. Throws Error where that fails.
void print(const std::string& text);

}  // namespace replayssm::cli
