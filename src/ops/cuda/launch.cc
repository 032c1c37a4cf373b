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
  const int bytes = step_layout(step.shape, step.ring, step.activation, config, 1).total;
  return bytes <= device.shared_bytes_per_block;
}

}  // namespace

Device current_device() {
  int device = 0;
  Device result;
  check_cuda(cudaGetDevice(&device), "current_device");
  check_cuda(cudaDeviceGetAttribute(&result.multiprocessors, cudaDevAttrMultiProcessorCount, device),
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
  // Slices until every multiprocessor has two blocks; heads while it keeps a few dozen.
  LaunchConfig config;
  const auto blocks = [&] {
    return step.sequences * shape.heads / config.heads * config.slices;
  };
  while (config.warps > 1 && shape.head_dim < config.warps * kPassRows) config.warps /= 2;
  while (blocks() < 2 * device.multiprocessors) {
    LaunchConfig next = config;
    next.slices *= 2;
    while (next.warps > 1 && shape.head_dim / next.slices < next.warps * kPassRows) next.warps /= 2;
    if (!fits(step, next, device)) break;
    config = next;
  }
  while (config.slices == 1 && blocks() >= 2 * 32 * device.multiprocessors &&
         group % (2 * config.heads) == 0 && config.heads < 4) {
    LaunchConfig next = config;
    next.heads *= 2;
    if (!fits(step, next, device)) break;
    config = next;
  }
  return config;
}

std::string to_string(const LaunchConfig& config) {
  return concat("heads=", config.heads, " slices=", config.slices, " warps=", config.warps);
}

}  // namespace replayssm::cuda
