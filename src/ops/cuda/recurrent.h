// The recurrence on CUDA devices (contracts: replayssm/ops.h, with device pointers). Everything is
// enqueued on `stream` and decided from device data: a captured graph stays valid whatever flushes
// and whatever is accepted.
//
// The step kernel takes windows of at most kMaxWindow tokens, state_dim 128 and head_dim a multiple
// of 8; rows of states, rings and windows, the scales of a read copy and the biases of channel
// gates at multiples of 16 bytes; read copies of 8 bits with 16-bit activations; checkpoints
// rounded to nearest; rings that fit into a block's shared memory. A general kernel takes all else,
// with the state in registers: both give the same checkpoints to the bit where both can.
//
// A step overlaps the kernel before it in the stream: kernels since the last begin or commit must
// not write slots, target slots, query starts, cursors, channel gates, rings or states that it
// reads.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "ops/cuda/cursors.h"
#include "ops/cuda/launch.h"
#include "replayssm/ops.h"

namespace replayssm::cuda {

// workspace: device memory of recurrent_workspace_bytes, 16 byte aligned, that no call on another
// stream uses meanwhile: with it large batches of single tokens are prepared by a launch of their
// own. May be null.
void recurrent_step(const RecurrentStepParams& params, void* workspace, const Device& device,
                    cudaStream_t stream);
int64_t recurrent_workspace_bytes(const RecurrentStepParams& params, const Device& device);
void recurrent_fold(const RecurrentFoldParams& params, const Device& device, cudaStream_t stream);

// How the step kernel takes a step; nothing where the general one has to. A function of shapes,
// types, alignment and device, and of whether the kernel before leaves the step room to run ahead.
std::optional<LaunchConfig> step_kernel_config(const RecurrentStepParams& params,
                                               const Device& device, bool has_room = true);

// The step kernel, cut into blocks as `config` says.
void recurrent_step(const RecurrentStepParams& params, void* workspace, const LaunchConfig& config,
                    cudaStream_t stream);
int64_t recurrent_workspace_bytes(const RecurrentStepParams& params, const LaunchConfig& config);

}  // namespace replayssm::cuda
