// The recurrence on the CPU (contracts: replayssm/ops.h). SIMD with run-time dispatch; for given
// instruction set the bits of a state depend on its own inputs alone, not on batch, threads or
// flushes.
#pragma once

#include "core/buffer.h"
#include "core/thread_pool.h"
#include "ops/layer_params.h"
#include "replayssm/ops.h"

namespace replayssm::cpu {

// Scratch memory of one call, in bytes, for a pool of `threads`.
int64_t recurrent_workspace_bytes(const RecurrentShape& shape, const RingConfig& ring, int threads);

void recurrent_step(const RecurrentStepParams& params, void* workspace, ThreadPool& pool);
void recurrent_prefill(const RecurrentPrefillParams& params, void* workspace, ThreadPool& pool);
void recurrent_fold(const RecurrentFoldParams& params, void* workspace, ThreadPool& pool);

// Rounds 16-bit snapshots to nearest even.
void snapshot_step(const SnapshotStepParams& params, void* workspace, ThreadPool& pool);

// Convolution of decode windows and of prompts alike.
void causal_conv(const ConvParams& params, ThreadPool& pool);

// The same over the last conv_kernel - 1 inputs of every slot, [slots, conv_kernel - 1, channels],
// which each call shifts and writes back: how engines without cursors do it, the baseline to
// compare with. Windows are chains; cursors are not read.
void shifting_conv(const ConvParams& params, ThreadPool& pool);

void mamba2_gates(const Mamba2GateParams& params, ThreadPool& pool);

void delta_gates(const DeltaGateParams& params, ThreadPool& pool);

}  // namespace replayssm::cpu
