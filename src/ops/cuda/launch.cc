#include "ops/cuda/launch.h"

#include <algorithm>
#include <bit>
#include <optional>

#include "core/check.h"
#include "ops/cuda/check_cuda.h"
#include "ops/cuda/launch_table.h"

namespace replayssm::cuda {
namespace {

// Of a warp.
int64_t most_passes(const RecurrentShape& shape, const LaunchConfig& config) {
  const int64_t passes = shape.head_dim / kPassRows / config.slices;
  return (passes + config.warps - 1) / config.warps;
}

bool fits(const StepDescription& step, const LaunchConfig& config, const Device& device) {
  return cuts(step.shape, config) && (step.has_room || !config.ahead) &&
         step_layout(step.shape, step.ring, step.types, config).total <=
             device.shared_bytes_per_block;
}

// Blocks that heads may be gathered into: as many as even out those that fold, and hide what each
// waits for. Where little state is read, or much computed, what heads share counts more.
int64_t least_blocks(const StepDescription& step, int64_t block_rows, const Device& device) {
  const bool single = step.ring.max_window == 1, mamba = step.shape.family == Family::kMamba2;
  const int64_t bytes = dtype_bytes(step.types.read), processors = device.multiprocessors;
  if (!step.replays) return processors * 15;
  if (!single) return processors * 5 / 2;
  if (mamba && bytes == 2) return processors * 7 / 2;
  if (bytes > 1) return processors * 11;
  return processors * (block_rows > 320 ? 24 : 15);
}

// Passes of all states.
int64_t all_passes(const StepDescription& step) {
  return step.sequences * step.shape.heads * (step.shape.head_dim / kPassRows);
}
// Most passes of a multiprocessor for which the chip has more warps than rows.
constexpr int64_t kFewPasses = 16;

// Few sequences run ahead, where they find room to.
std::optional<LaunchConfig> taken_ahead(const StepDescription& step, const Device& device) {
  const int64_t passes = all_passes(step), processors = device.multiprocessors;
  if (!step.replays || passes > kFewPasses * processors ||
      !can_run_ahead(step.shape.family, step.types.activation, step.types.checkpoint,
                     step.types.read != step.types.checkpoint, step.ring.max_window > 1))
    return {};
  const int64_t head_passes = step.shape.head_dim / kPassRows;
  LaunchConfig config{.ahead = true};
  const int64_t of_warp = passes <= kFewPasses / 2 * processors ? 1 : kPassesAhead;
  config.slices = static_cast<int>(std::max<int64_t>(1, head_passes / (config.warps * of_warp)));
  while (config.slices < head_passes && !cuts(step.shape, config)) ++config.slices;
  return fits(step, config, device) ? std::optional(config) : std::nullopt;
}

// A fold is several times as long as a step without. As long as few blocks come behind it, others
// share it: the delta rule's, which is the longest, and Mamba-2's of single tokens where it does
// not run on the tensor cores.
LaunchConfig with_shared_folds(const StepDescription& step, LaunchConfig config,
                               const Device& device) {
  const auto& shape = step.shape;
  const bool many = step.ring.max_window > 1, delta = is_delta(shape.family);
  const bool tiles = folds_in_tiles(shape.family, step.types.activation, step.types.checkpoint,
                                    step.types.read != step.types.checkpoint);
  if (!step.replays || config.slices > 1 || config.preparing > 0 || (!delta && (many || tiles)))
    return config;
  const int most = many ? 2 : tiles ? 4 : 8;
  const int64_t most_blocks = (many ? 8 : 16) * device.multiprocessors;
  const int64_t blocks = step.sequences * shape.heads / config.heads;
  const int64_t passes = shape.head_dim / kPassRows * config.heads, least_passes = delta ? 2 : 5;
  while (true) {
    LaunchConfig next = config;
    next.fold_blocks *= 2;
    if (next.fold_blocks > most || blocks * next.fold_blocks > most_blocks ||
        passes < least_passes * next.fold_blocks || !cuts(shape, next))
      return config;
    config = next;
  }
}

// With a launch that prepares, for what was measured to gain by it: large batches, where little is
// read of a state, or much computed for it.
LaunchConfig prepared(const StepDescription& step, const LaunchConfig& config,
                      const Device& device) {
  const auto& shape = step.shape;
  const bool pays = shape.family == Family::kKimiDelta ||
                    (dtype_bytes(step.types.read) == 1 && shape.head_dim <= 64);
  if (!step.replays || !pays ||
      !can_prepare(shape.family, step.types.activation, step.ring.max_window > 1))
    return config;
  const LaunchConfig next{
      .heads = std::min(config.heads, 4), .warps = config.warps, .preparing = 1};
  const int64_t blocks = step.sequences * shape.heads / next.heads;
  return blocks < int64_t{24} * device.multiprocessors ? config : next;
}

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
          .sequences = params.batch.sequences,
          .replays = params.route != Route::kConventional};
}

bool cuts(const RecurrentShape& shape, const LaunchConfig& config) {
  return config.heads >= 1 && config.slices >= 1 &&
         shape.heads / shape.key_heads % config.heads == 0 &&
         shape.head_dim % (config.slices * kPassRows) == 0 &&
         (config.heads == 1 || config.slices == 1) && std::has_single_bit(unsigned(config.warps)) &&
         config.warps <= kMaxWarps && config.preparing >= 0 && config.preparing <= kMaxWarps &&
         (config.preparing == 0 || config.slices == 1) &&
         std::has_single_bit(unsigned(config.fold_blocks)) &&
         shape.head_dim * config.heads % (config.slices * kPassRows * config.fold_blocks) == 0 &&
         (config.fold_blocks == 1 || (config.preparing == 0 && !config.ahead)) &&
         (!config.ahead || (config.heads == 1 && config.preparing == 0 &&
                            most_passes(shape, config) <= kPassesAhead));
}

LaunchConfig choose_launch(const StepDescription& step, const Device& device) {
  const TunedLaunch* tuned = find_tuned(launch_table(), step, device);
  if (step.replays && tuned && fits(step, tuned->config, device)) return tuned->config;
  return launch_by_rule(step, device);
}

LaunchConfig launch_by_rule(const StepDescription& step, const Device& device) {
  const auto& shape = step.shape;
  if (const auto config = taken_ahead(step, device)) return *config;
  LaunchConfig config;
  // Few passes: slices, until nearly every multiprocessor has two blocks, or three of the delta
  // rule's, which wait longer for themselves; in windows only as long as a warp has much to do.
  const int64_t processors = device.multiprocessors;
  const bool slices = !step.replays || all_passes(step) <= kFewPasses * processors;
  const auto most_blocks = [&] {
    const bool waits = is_delta(shape.family) &&
                       (step.ring.max_window == 1 || most_passes(shape, config) > kPassesAhead);
    return waits ? 3 * processors : 2 * processors - 8;
  };
  while (slices && step.sequences * shape.heads * config.slices < most_blocks()) {
    LaunchConfig next = config;
    next.slices *= 2;
    if (shape.head_dim / next.slices < 2 * kPassRows || !fits(step, next, device)) break;
    config = next;
  }
  // Many: heads share what a block needs once.
  const bool bytes = dtype_bytes(step.types.read) == 1;
  const bool updates = !step.replays && shape.family == Family::kMamba2;
  const int64_t most_rows = updates ? 160 : bytes && step.ring.max_window == 1 ? 512 : 320;
  while (true) {
    LaunchConfig next = config;
    next.heads *= 2;
    const int64_t rows = shape.head_dim * next.heads;
    if (rows > most_rows) break;
    if (step.sequences * shape.heads / next.heads < least_blocks(step, rows, device)) break;
    if (!fits(step, next, device)) break;
    config = next;
  }
  return with_shared_folds(step, prepared(step, config, device), device);
}

std::string to_string(const LaunchConfig& config) {
  return concat("heads=", config.heads, " slices=", config.slices, " warps=", config.warps,
                " preparing=", config.preparing, " ahead=", int{config.ahead},
                " fold_blocks=", config.fold_blocks);
}

}  // namespace replayssm::cuda
