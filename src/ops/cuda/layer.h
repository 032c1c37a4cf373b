// A layer's whole decode step on CUDA devices (contract: LayerStepParams in replayssm/ops.h, with
// device pointers).
//
// Beyond recurrent_step, rows of projections start at multiples of 16 bytes. A step overlaps the
// kernel before it in the stream: kernels since the last begin or commit must not write what that
// one may not, kept inputs of the convolution, or constants of the layer.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/launch.h"
#include "replayssm/ops.h"

namespace replayssm::cuda {

// Device memory of one call, in bytes.
int64_t layer_workspace_bytes(const LayerStepParams& params);

// Two launches: the step with convolution and gates in front, then the norm. A convolution of other
// than four taps, or a step that the step kernel does not take, has a launch for each op.
void layer_step(const LayerStepParams& params, void* workspace, const Device& device,
                cudaStream_t stream);
// The step kernel, cut into blocks as `config` says. A convolution has four taps.
void layer_step(const LayerStepParams& params, void* workspace, const LaunchConfig& config,
                cudaStream_t stream);

// The same bits from a launch for each op, to compare with.
void layer_step_unfused(const LayerStepParams& params, void* workspace, const Device& device,
                        cudaStream_t stream);

}  // namespace replayssm::cuda
