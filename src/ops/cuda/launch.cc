#include "ops/cuda/launch.h"

#include <algorithm>

#include "core/check.h"
#include "ops/cuda/check_cuda.h"

namespace replayssm::cuda {
namespace {

bool fits(const StepDescription& step, const LaunchConfig& config, const Device& device) {
  const int64_t rows = step.shape.head_dim * config.heads / config.slices;
  if (step.shape.head_dim % (config.slices * kPassRows) != 0) return false;
  if (rows < config.warps * kPassRows) return false;
  const int bytes = step_layout(step.shape, step.ring, step.activation, step.read, config, 1).total;
  return bytes <= device.shared_bytes_per_block;
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
          .route = params.route,
          .activation = params.state.activation_dtype,
          .read = params.state.read_copy.data ? params.state.read_copy.dtype
                                              : params.state.checkpoint_dtype,
          .sequences = params.batch.sequences};
}

LaunchConfig choose_launch(const StepDescription& step, const Device& device) {
  const auto& shape = step.shape;
  const int64_t group = shape.heads / shape.key_heads;
  LaunchConfig config;
  const auto rows = [&](const LaunchConfig& c) { return shape.head_dim * c.heads / c.slices; };
  while (rows(config) < config.warps * kPassRows) config.warps /= 2;
  // Few sequences: slices of one pass a warp, until every multiprocessor has two blocks.
  while (step.sequences * shape.heads * config.slices < 2 * device.multiprocessors) {
    LaunchConfig next = config;
    next.slices *= 2;
    if (rows(next) < next.warps * kPassRows || !fits(step, next, device)) break;
    config = next;
  }
  // Many: heads share what a block needs once, as long as each multiprocessor has blocks enough to
  // even out those that fold. Smaller states leave less time to hide it.
  const int most = dtype_bytes(step.read) < 4 ? 4 : 2;
  while (config.slices == 1 && config.heads < most && group % (2 * config.heads) == 0) {
    LaunchConfig next = config;
    next.heads *= 2;
    if (step.sequences * shape.heads / next.heads < 15 * device.multiprocessors) break;
    if (!fits(step, next, device)) break;
    config = next;
  }
  // Mamba-2's warps share nothing of a head: one for all its rows, where they are few.
  if (shape.family == Family::kMamba2 && config.heads == 2 && rows(config) <= 128 &&
      step.sequences * shape.heads / config.heads >= 60 * device.multiprocessors)
    config.warps = std::min(config.warps, 2);
  return config;
}

std::string to_string(const LaunchConfig& config) {
  return concat("heads=", config.heads, " slices=", config.slices, " warps=", config.warps);
}

}  // namespace replayssm::cuda
