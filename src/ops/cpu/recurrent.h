// The recurrence on the CPU (contracts: replayssm/ops.h). SIMD with run-time dispatch; for given
// instruction set the bits of a state depend on its own inputs alone, not on batch, threads or
// flushes.
#pragma once

#include "core/buffer.h"
#include "core/thread_pool.h"
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

// Mamba-2: b = clamp(softplus(dt + dt_bias), dt_min, dt_max), g = b * a with a = -exp(A_log).
// dt: [tokens, heads], tokens dt_stride apart; b, g: [tokens, heads].
struct Mamba2GateParams {
  const float* dt = nullptr;
  int64_t dt_stride = 0;
  const float* dt_bias = nullptr;
  const float* a = nullptr;
  float dt_min = 0;
  float dt_max = 0;
  int64_t tokens = 0;
  int64_t heads = 0;
  float* b = nullptr;
  float* g = nullptr;
};
void mamba2_gates(const Mamba2GateParams& params, ThreadPool& pool);

// Gated Delta: b = sigmoid(beta), g = a * softplus(alpha + dt_bias) with a = -exp(A_log).
// beta, alpha: [tokens, heads], tokens `stride` apart. Without alpha (Kimi Delta) b only.
struct DeltaGateParams {
  const float* beta = nullptr;
  const float* alpha = nullptr;
  int64_t stride = 0;
  const float* dt_bias = nullptr;
  const float* a = nullptr;
  int64_t tokens = 0;
  int64_t heads = 0;
  float* b = nullptr;
  float* g = nullptr;
};
void delta_gates(const DeltaGateParams& params, ThreadPool& pool);

}  // namespace replayssm::cpu
