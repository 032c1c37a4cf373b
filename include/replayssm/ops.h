// The recurrence of a hybrid model's state-space layers as a library of plain functions.
//
// Per value head the state S is [head_dim, state_dim] and a token i brings a key k, a value v, a
// query q, a write strength b and a decay a = exp(g):
//
//   S_i = (S_{i-1} a_i) (I - d b_i k_i k_i^T) + b_i v_i k_i^T        o_i = S_i q_i
//
//   family        k, q                               d
//   Mamba-2       B, C as given                      0
//   Gated Delta   L2-normalised, q scaled by K^-1/2  1
//
// A sequence's state is a checkpoint plus the ring of inputs since that checkpoint. Ops neither
// allocate, nor synchronise with other processes, nor keep anything between calls. Strides are in
// elements. Sequences are rows of a batch; their windows of new tokens lie packed one behind
// another: sequence s owns tokens [query_start[s], query_start[s + 1]). A slot of -1 marks padding:
// nothing is read or written for it and its outputs are zeroed.
#pragma once

#include <cstdint>

#include "replayssm/types.h"

namespace replayssm {

// Largest state_dim that the ops accept.
inline constexpr int64_t kMaxStateDim = 1024;

// Most taps of the convolution.
inline constexpr int64_t kMaxConvKernel = 8;

// Added to the sum of squares when k and q are L2-normalised.
inline constexpr float kL2NormEps = 1e-6f;

// How a pool's rings are built and when they flush.
struct RingConfig {
  int32_t buffer_len = 16;  // most history rows a ring holds, >= 1
  int32_t max_window = 1;   // most tokens of one decode step, >= 1
  int32_t conv_kernel = 4;  // taps of the causal convolution in front, 1 .. kMaxConvKernel
};

// Where a slot stands; shared by all layers. Arithmetic: src/replay/cursor.h.
struct Cursor {
  int64_t ring_start = 0;  // token counter of the oldest row in the ring
  int32_t ring_count = 0;  // rows in the ring
  int32_t ring_limit = 0;  // a window that would exceed it flushes first
  int32_t fold_count = 0;  // rows in front of ring_start that this step folds
};

// The geometry of one recurrent layer.
struct RecurrentShape {
  Family family = Family::kMamba2;
  int64_t heads = 0;      // HV: value heads
  int64_t key_heads = 0;  // H: heads of k and q, divides heads; consecutive value heads share one
  int64_t head_dim = 0;   // V
  int64_t state_dim = 0;  // K, at most kMaxStateDim
};

// What a pool keeps for one recurrent layer.
struct RecurrentState {
  void* checkpoint = nullptr;  // [slots, HV, V, K] checkpoint_dtype
  void* ring_v = nullptr;      // [slots, R, HV, V] activation dtype
  void* ring_k = nullptr;      // [slots, R, H, K]  activation dtype, before L2 normalisation
  float* ring_b = nullptr;     // [slots, R, HV]    write strength
  float* ring_g = nullptr;     // [slots, R, HV]    log decay, <= 0
  DType checkpoint_dtype = DType::kFloat32;
  DType activation_dtype = DType::kFloat32;
};

// The sequences of a call.
struct SequenceBatch {
  int64_t sequences = 0;
  const int32_t* query_start = nullptr;  // [sequences + 1]
  const int32_t* slot = nullptr;         // [sequences]
  const Cursor* cursors = nullptr;       // [slots], as the begin of this step left them
  RingConfig ring;
};

// One decode step of a layer: appends the windows to the rings, folds what is due and reads out.
struct RecurrentStepParams {
  RecurrentShape shape;
  Route route = Route::kOutputOnly;
  SequenceBatch batch;
  RecurrentState state;

  // New tokens, in the activation dtype.
  const void* v = nullptr;  // [tokens, HV, V]
  const void* k = nullptr;  // [tokens, H, K]
  const void* q = nullptr;  // [tokens, H, K]
  int64_t v_stride = 0;     // from token to token
  int64_t k_stride = 0;
  int64_t q_stride = 0;
  const float* b = nullptr;  // [tokens, HV]
  const float* g = nullptr;  // [tokens, HV]

  float* o = nullptr;  // [tokens, HV, V]
};

// The same over long windows, in chunks: reads and writes the checkpoint, leaves the ring alone.
// The rings of all slots must be empty.
struct RecurrentPrefillParams : RecurrentStepParams {};

// Folds every ring row of the given slots into their checkpoints.
struct RecurrentFoldParams {
  RecurrentShape shape;
  SequenceBatch batch;  // query_start is not read
  RecurrentState state;
};

// The causal depthwise convolution and SiLU in front of a recurrent layer, over the same windows:
//
//   y[i, c] = silu(bias[c] + sum_j weight[j, c] x[i - (conv_kernel - 1) + j, c])
//
// Inputs are rounded to the activation dtype first. The input of the token at counter p is kept in
// row p mod conv_rows; those before the window are read from there.
struct ConvParams {
  SequenceBatch batch;
  int64_t channels = 0;
  DType activation_dtype = DType::kFloat32;
  const float* x = nullptr;       // [tokens, channels]
  int64_t x_stride = 0;           // from token to token
  const float* weight = nullptr;  // [conv_kernel, channels], the last tap is the current token's
  const float* bias = nullptr;    // [channels], may be null
  void* inputs = nullptr;         // [slots, conv_rows, channels] activation dtype
  void* y = nullptr;              // [tokens, channels] activation dtype
};

}  // namespace replayssm
