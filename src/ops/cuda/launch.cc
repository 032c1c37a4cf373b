#include "ops/cuda/launch.h"

#include <algorithm>
#include <bit>
#include <charconv>

#include "core/check.h"
#include "ops/cuda/check_cuda.h"
#include "ops/cuda/launch_table.h"

namespace replayssm::cuda {
namespace {

bool fits(const StepDescription& step, const LaunchConfig& config, const Device& device) {
  if (step.shape.head_dim % (config.slices * kPassRows) != 0) return false;
  return step_layout(step.shape, step.ring, step.types, config).total <=
         device.shared_bytes_per_block;
}

// Whether the kernel can be cut so.
bool cuts(const StepDescription& step, const LaunchConfig& config, const Device& device) {
  const int64_t group = step.shape.heads / step.shape.key_heads;
  return config.heads >= 1 && config.slices >= 1 && config.warps >= 1 &&
         group % config.heads == 0 && (config.heads == 1 || config.slices == 1) &&
         std::has_single_bit(unsigned(config.warps)) && config.warps <= kMaxWarps &&
         fits(step, config, device);
}

struct Field {
  std::string_view name;
  int LaunchConfig::* value;
};
constexpr Field kFields[] = {{"heads", &LaunchConfig::heads},
                             {"slices", &LaunchConfig::slices},
                             {"warps", &LaunchConfig::warps}};

}  // namespace

Device current_device() {
  int device = 0;
  Device result;
  check_cuda(cudaGetDevice(&device), "current_device");
  check_cuda(
      cudaDeviceGetAttribute(&result.multiprocessors, cudaDevAttrMultiProcessorCount, device),
      "current_device");
  check_cuda(cudaDeviceGetAttribute(&result.shared_bytes_per_block,
                                    cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "current_device");
  return result;
}

StepDescription describe(const RecurrentStepParams& params) {
  return {.shape = params.shape,
          .ring = params.batch.ring,
          .types = {.activation = params.state.activation_dtype,
                    .checkpoint = params.state.checkpoint_dtype,
                    .read = params.state.read_copy.data ? params.state.read_copy.dtype
                                                        : params.state.checkpoint_dtype},
          .sequences = params.batch.sequences};
}

LaunchConfig choose_launch(const StepDescription& step, const Device& device) {
  if (const TunedLaunch* tuned = find_tuned(launch_table(), step, device)) {
    const auto config = parse_launch(tuned->config);
    if (config && cuts(step, *config, device)) return *config;
  }
  return launch_by_rule(step, device);
}

LaunchConfig launch_by_rule(const StepDescription& step, const Device& device) {
  const auto& shape = step.shape;
  const int64_t group = shape.heads / shape.key_heads;
  LaunchConfig config;
  // Few sequences: slices, until nearly every multiprocessor has two blocks.
  while (step.sequences * shape.heads * config.slices < 2 * device.multiprocessors - 8) {
    LaunchConfig next = config;
    next.slices *= 2;
    if (shape.head_dim / next.slices < 2 * kPassRows || !fits(step, next, device)) break;
    config = next;
  }
  // Many: heads share what a block needs once, as long as each multiprocessor has blocks enough to
  // even out those that fold, and blocks enough at a time to hide what each waits for.
  // Less state a head, or more work for each, leave less time for it.
  const bool single = step.ring.max_window == 1;
  const bool plain = single && step.types.read == DType::kFloat32;
  const bool bytes = single && dtype_bytes(step.types.read) == 1;
  const int64_t most_rows = plain && shape.family == Family::kMamba2 ? 160 : bytes ? 512 : 320;
  while (config.slices == 1 && group % (2 * config.heads) == 0 &&
         shape.head_dim * 2 * config.heads <= most_rows) {
    LaunchConfig next = config;
    next.heads *= 2;
    if (step.sequences * shape.heads / next.heads < 15 * device.multiprocessors) break;
    if (!fits(step, next, device)) break;
    config = next;
  }
  return config;
}

std::string to_string(const LaunchConfig& config) {
  std::string text;
  for (const Field& field : kFields)
    text += concat(text.empty() ? "" : " ", field.name, "=", config.*field.value);
  return text;
}

std::optional<LaunchConfig> parse_launch(std::string_view text) {
  LaunchConfig config;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    const size_t equals = word.find('=');
    if (equals == word.npos) return {};
    const auto field = std::ranges::find(kFields, word.substr(0, equals), &Field::name);
    if (field == std::end(kFields)) return {};
    const std::string_view number = word.substr(equals + 1);
    int& value = config.*field->value;
    const auto [end, error] = std::from_chars(number.begin(), number.end(), value);
    if (error != std::errc() || end != number.end()) return {};
  }
  return config;
}

}  // namespace replayssm::cuda
