// Speculative decoding by snapshots on CUDA devices (contract: SnapshotStepParams in
// replayssm/ops.h, with device pointers). Everything is decided from device data: a captured call
// stays valid for all windows of at most max_window tokens.
//
// A call overlaps the kernel before it in the stream: kernels since the last begin or commit must
// not write slots, query starts, sources or states that it reads.
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/ops.h"

namespace replayssm::cuda {

// Rounds 16-bit snapshots to nearest even. Fastest for state_dim of 64, 128 and 256 in rows that
// start at multiples of 16 bytes.
void snapshot_step(const SnapshotStepParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
