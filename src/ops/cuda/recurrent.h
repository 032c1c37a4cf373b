// The recurrence on CUDA devices (contracts: replayssm/ops.h, with device pointers). Everything is
// enqueued on `stream` and decided from device data: a captured graph stays valid whatever flushes
// and whatever is accepted.
//
// Windows of at most kMaxWindow tokens. state_dim is 128, head_dim a multiple of 8; rows of states,
// rings and windows, the scales of a read copy and the biases of channel gates start at multiples
// of 16 bytes. Read copies have 8 bits, their activations 16. All rows of ring and window lie in a
// block's shared memory, which bounds buffer_len to some hundred.
//
// A step overlaps the kernel before it in the stream: kernels since the last begin or commit must
// not write slots, target slots, query starts, cursors, channel gates, rings or states that it
// reads.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/cursors.h"
#include "ops/cuda/launch.h"
#include "replayssm/ops.h"

namespace replayssm::cuda {

void recurrent_step(const RecurrentStepParams& params, const Device& device, cudaStream_t stream);
void recurrent_fold(const RecurrentFoldParams& params, const Device& device, cudaStream_t stream);

// The same, cut into blocks as `config` says.
void recurrent_step(const RecurrentStepParams& params, const LaunchConfig& config,
                    cudaStream_t stream);

}  // namespace replayssm::cuda
