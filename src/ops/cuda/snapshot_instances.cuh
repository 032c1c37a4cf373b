// Picks an instantiation of the snapshot kernel and launches it.
#pragma once

#include <cmath>

#include "core/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/snapshot_kernel.cuh"

namespace replayssm::cuda {

template <Family kFamily, class State, int kState, bool kWhole>
void launch_snapshot_instance(const SnapshotStepParams& p, cudaStream_t stream) {
  using Rows = SnapshotRows<kFamily, State, kState, kWhole>;
  int warps = kSnapshotWarps;
  while (warps > 1 && p.shape.head_dim % (warps * Rows::kWarpRows) != 0) warps /= 2;
  // Two passes have more of the state on its way, one gives more blocks.
  const int64_t pass_rows = warps * Rows::kWarpRows;
  const int64_t all_rows = p.batch.sequences * p.shape.heads * p.shape.head_dim;
  const bool two = kWhole && p.shape.head_dim % (2 * pass_rows) == 0 &&
                   all_rows / (2 * pass_rows) >= 8 * multiprocessors("snapshot_step");
  const int rows = static_cast<int>(pass_rows) * (two ? 2 : 1);
  const int64_t slices = (p.shape.head_dim + rows - 1) / rows;
  const int words = kWhole ? rows * kState * int(sizeof(State)) / int(sizeof(float)) : 0;
  SnapshotLaunch launch;
  launch.layout = snapshot_layout(Rows::kChannels, kState, rows, words, p.batch.ring.max_window);
  launch.layout.passes = two ? 2 : 1;
  launch.heads = static_cast<int>(p.shape.heads);
  launch.head_dim = static_cast<int>(p.shape.head_dim);
  launch.state_dim = static_cast<int>(p.shape.state_dim);
  launch.query_scale = 1.0f / std::sqrt(static_cast<float>(p.shape.state_dim));
  launch.group = FastDivide(static_cast<uint32_t>(p.shape.heads / p.shape.key_heads));
  launch.slices = FastDivide(static_cast<uint32_t>(slices));
  const auto kernel = snapshot_step_kernel<kFamily, State, kState, kWhole>;
  const int bytes = launch.layout.total * int(sizeof(float));
  reserve_shared("snapshot_step", kernel, bytes);
  launch_dependent(
      "snapshot_step", kernel,
      dim3(static_cast<unsigned>(p.shape.heads * slices), static_cast<unsigned>(p.batch.sequences)),
      32 * warps, bytes, stream, p, launch);
}

template <Family kFamily, class State>
void launch_snapshot_state(const SnapshotStepParams& p, bool aligned, cudaStream_t stream) {
  if (aligned && p.shape.state_dim == 64)
    return launch_snapshot_instance<kFamily, State, 64, true>(p, stream);
  if (aligned && p.shape.state_dim == 128)
    return launch_snapshot_instance<kFamily, State, 128, true>(p, stream);
  if (aligned && p.shape.state_dim == 256)
    return launch_snapshot_instance<kFamily, State, 256, true>(p, stream);
  if (p.shape.state_dim <= 256)
    return launch_snapshot_instance<kFamily, State, 256, false>(p, stream);
  launch_snapshot_instance<kFamily, State, kMaxStateDim, false>(p, stream);
}

template <Family kFamily>
void launch_snapshot(const SnapshotStepParams& p, bool aligned, cudaStream_t stream) {
  switch (p.state.checkpoint_dtype) {
    case DType::kBFloat16: return launch_snapshot_state<kFamily, Bf16>(p, aligned, stream);
    case DType::kFloat16: return launch_snapshot_state<kFamily, Fp16>(p, aligned, stream);
    default: return launch_snapshot_state<kFamily, float>(p, aligned, stream);
  }
}

}  // namespace replayssm::cuda
