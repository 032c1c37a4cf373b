// A layer's whole decode step on the CPU (contract: LayerStepParams in replayssm/ops.h).
#pragma once

#include "core/thread_pool.h"
#include "replayssm/ops.h"

namespace replayssm::cpu {

// Scratch memory of one call, in bytes, for a pool of `threads`.
int64_t layer_workspace_bytes(const LayerStepParams& params, int threads);

// Projections are float32 here.
void layer_step(const LayerStepParams& params, void* workspace, ThreadPool& pool);

}  // namespace replayssm::cpu
