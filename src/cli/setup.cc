#include "cli/setup.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <system_error>

#include "cli/progress.h"
#include "core/check.h"

namespace replayssm::cli {
namespace {

namespace fs = std::filesystem;

// Where bundled models lie: beside an installed program, or in the source it was built from.
// Shapes are configurations of published models, for random weights.
std::vector<fs::path> model_folders(bool shapes) {
  std::vector<fs::path> folders;
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (!error) folders.push_back(program.parent_path().parent_path() / "share/replayssm/models");
  folders.emplace_back(REPLAYSSM_MODELS_DIR);
  for (fs::path& folder : folders) {
    if (shapes) folder /= "shapes";
  }
  return folders;
}

std::vector<std::string> bundled_models(bool shapes) {
  std::vector<std::string> names;
  for (const fs::path& folder : model_folders(shapes)) {
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder, error)) {
      if (fs::exists(entry.path() / "config.json")) names.push_back(entry.path().filename());
    }
  }
  std::ranges::sort(names);
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace

fs::path find_model(const ModelOptions& options) {
  if (options.device == "cuda") {
    if (const std::string obstacle = cuda_obstacle(); !obstacle.empty())
      fail("--device: expected auto or cpu, got cuda: ", obstacle);
  }
  const std::string& model = options.model;
  std::error_code error;
  if (fs::is_directory(model, error)) return model;
  const bool shapes = options.dummy_weights;
  const std::vector<std::string> bundled = bundled_models(shapes);
  if (std::ranges::count(bundled, model) > 0) {
    for (const fs::path& folder : model_folders(shapes)) {
      if (fs::is_directory(folder / model, error)) return folder / model;
    }
  }
  std::string names;
  for (const std::string& name : bundled) names += (names.empty() ? "" : ", ") + name;
  fail("MODEL: expected a folder or a bundled ", shapes ? "shape (" : "model (",
       names.empty() ? "none here" : names, "), got '", model, "'",
       !shapes && std::ranges::count(bundled_models(true), model) > 0
           ? ", a shape without weights: --load-format dummy runs it"
           : "");
}

std::string model_name(const fs::path& folder) { return fs::canonical(folder).filename(); }

namespace {

std::unique_ptr<Model> load_on_device(const fs::path& folder, const ModelOptions& options,
                                      ThreadPool& threads) {
  const DType dtype = options.dtype.value_or(DType::kBFloat16);
  Progress progress("loading");
  const ModelSource source{
      .folder = folder,
      .dummy_weights = options.dummy_weights,
      .draft_head = options.draft_head,
      .progress = [&](int64_t done, int64_t total) { progress.update(done, total); }};
  const bool cuda =
      options.device == "cuda" || (options.device == "auto" && cuda_obstacle().empty() &&
                                   cuda_obstacle(load_config(folder)).empty());
  return cuda ? load_cuda_model(source, dtype) : load_cpu_model(source, dtype, threads);
}

}  // namespace

LoadedModel load_model(const fs::path& folder, const ModelOptions& options) {
  LoadedModel loaded;
  loaded.threads = std::make_unique<ThreadPool>(options.threads);
  loaded.model = load_on_device(folder, options, *loaded.threads);
  return loaded;
}

LoadedModel load_model(const fs::path& folder, const ModelOptions& options,
                       const std::optional<SpeculativeConfig>& speculation) {
  ModelOptions with_head = options;
  with_head.draft_head = speculation && speculation->method == DraftMethod::kMtp;
  LoadedModel loaded = load_model(folder, with_head);
  if (speculation && speculation->method == DraftMethod::kDraftModel) {
    ModelOptions draft = options;
    draft.model = speculation->model;
    loaded.draft_model = load_on_device(find_model(draft), draft, *loaded.threads);
  }
  return loaded;
}

LoadedModel load_model(const fs::path& folder, const DecodingOptions& options) {
  return load_model(folder, options.model, speculation_of(options.speculation, options.route));
}

EngineOptions engine_options(const DecodingOptions& options, const LoadedModel& loaded) {
  return {.route = options.route.route(),
          .ring = {.buffer_len = options.state.buffer_len},
          .state_dtype = state_dtype(options.state, loaded.model->config()),
          .read_dtype = options.state.read_dtype,
          .max_num_seqs = options.limits.max_num_seqs,
          .max_num_batched_tokens = options.limits.batched_tokens(),
          .max_model_len = options.limits.max_model_len,
          .memory_utilization = options.limits.gpu_memory_utilization,
          .speculative = speculation_of(options.speculation, options.route),
          .draft_model = loaded.draft_model.get()};
}

DType state_dtype(const StateOptions& options, const ModelConfig& config) {
  return options.state_dtype.value_or(config.state_dtype);
}

int64_t machine_memory() { return sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE); }

void check_ids(const std::vector<int32_t>& ids, const ModelConfig& config,
               const std::string& where) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < config.vocab_size) continue;
    fail(where, ": token ", i, ": expected an id from 0 to ", config.vocab_size - 1, ", got ",
         ids[i]);
  }
}

std::string read_text(const std::string& path, const std::string& flag) {
  std::FILE* const file = path == "-" ? stdin : std::fopen(path.c_str(), "rb");
  if (!file) fail(flag, " ", path, ": ", std::strerror(errno));
  std::string text;
  constexpr size_t kMaxBytes = size_t{256} << 20;
  char piece[1 << 16];
  while (const size_t count = std::fread(piece, 1, sizeof piece, file)) {
    text.append(piece, count);
    if (text.size() > kMaxBytes) break;
  }
  const int error = std::ferror(file) ? errno : 0;
  if (file != stdin) std::fclose(file);
  if (error != 0) fail(flag, " ", path, ": ", std::strerror(error));
  if (text.size() > kMaxBytes) fail(flag, " ", path, ": expected at most ", kMaxBytes, " bytes");
  return text;
}

void print(const std::string& text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (!written || std::fflush(stdout) != 0) fail("standard output: ", std::strerror(errno));
}

}  // namespace replayssm::cli
