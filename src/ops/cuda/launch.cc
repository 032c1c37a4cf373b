#include "ops/cuda/launch.h"

#include "core/check.h"
#include "ops/cuda/check_cuda.h"

namespace replayssm::cuda {
namespace {

bool fits(const StepDescription& step, const LaunchConfig& config, const Device& device) {
  if (step.shape.head_dim % (config.slices * kPassRows) != 0) return false;
  return step_layout(step.shape, step.ring, step.types, config).total <=
         device.shared_bytes_per_block;
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
          .sequences = params.batch.sequences};
}

LaunchConfig choose_launch(const StepDescription& step, const Device& device) {
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
  return concat("heads=", config.heads, " slices=", config.slices, " warps=", config.warps);
}

}  // namespace replayssm::cuda
