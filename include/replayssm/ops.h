// The recurrence of a hybrid model's state-space layers as a library of plain functions.
//
// Per value head the state S is [head_dim, state_dim] and a token i brings a key k, a value v, a
// query q, a write strength b and a decay a = exp(g):
//
//   S_i = (S_{i-1} a_i) (I - d b_i k_i k_i^T) + b_i v_i k_i^T        o_i = S_i q_i
//
//   family        k, q                               a                          d
//   Mamba-2       B, C as given                      a scalar per head          0
//   Gated Delta   L2-normalised, q scaled by K^-1/2  a scalar per head          1
//   Kimi Delta    L2-normalised, q scaled by K^-1/2  a vector: one per column   1
//
// A sequence's state is a checkpoint plus the ring of inputs since that checkpoint. Ops neither
// allocate, nor synchronise with other processes, nor keep anything between calls. Strides are in
// elements. Sequences are rows of a batch; their windows of new tokens lie packed one behind
// another: sequence s owns tokens [query_start[s], query_start[s + 1]). A slot of -1 marks padding:
// nothing is read or written for it and its outputs are zeroed.
//
// One step of a model: begin (once), then per layer layer_step, or causal_conv, the gates,
// recurrent_step and the gated norm one by one, then commit (once). A tree window is committed by
// compact of every layer before the commit moves the cursors.
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

// A second, rounded copy of the checkpoint. Replay steps that do not fold read it and not the
// checkpoint; whatever writes the checkpoint writes the copy from the same fp32 values. Its
// rounding never enters the recurrence. An 8-bit row is q scale with scale = max |row| /
// dtype_max_8bit and q = row / scale, rounded to nearest even; where that scale would be below the
// normal fp32 range, scale and q are 0.
struct ReadCopy {
  void* data = nullptr;    // [slots, HV, V, K]; null: there is none
  float* scale = nullptr;  // [slots, HV, V] for 8-bit types
  DType dtype = DType::kFloat16;
};

// What a pool keeps for one recurrent layer.
struct RecurrentState {
  void* checkpoint = nullptr;  // [slots, HV, V, K] checkpoint_dtype
  void* ring_v = nullptr;      // [slots, R, HV, V] activation dtype
  void* ring_k = nullptr;      // [slots, R, H, K]  activation dtype, before L2 normalisation
  float* ring_b = nullptr;     // [slots, R, HV]    write strength
  float* ring_g = nullptr;     // [slots, R, HV]    log decay, <= 0 (not Kimi Delta)
  void* ring_gate = nullptr;   // [slots, R, HV, K] Kimi Delta's raw gates, activation dtype
  DType checkpoint_dtype = DType::kFloat32;  // float32, float16 or bfloat16
  DType activation_dtype = DType::kFloat32;  // float32, float16 or bfloat16
  ReadCopy read_copy;
};

// Stochastic rounding of a 16-bit checkpoint, unbiased. Every state row is cut into groups of 8
// columns, ceil(K / 8) of them, counted through the rows of the slot. The random bits of a group
// are philox4x32_10(key = seed[slot], counter = (low and high word of the token counter behind the
// last stored token, stream, group)): they depend on the sequence, its position and the element, on
// nothing else. Column c of a group has the low (c even) or high half of word c / 2. It rounds away
// from zero where floor(2^16 f) + bits >= 2^16, with f its distance from the next value towards
// zero in units of the gap.
struct StochasticRounding {
  const uint64_t* seed = nullptr;  // [slots]; null: round to nearest even
  uint32_t stream = 0;             // distinct in every layer
};

// Kimi Delta's log decay of a head's column: scale[head] * softplus(raw + bias[head, column]), or,
// where lower_bound < 0, lower_bound * sigmoid(-scale[head] * (raw + bias[head, column])).
struct ChannelGate {
  const float* scale = nullptr;  // [HV] -exp(A_log)
  const float* bias = nullptr;   // [HV, K] dt_bias
  float lower_bound = 0;
};

// What the layers of a step ask of a sequence (replay/step_plan.h).
struct SequencePlan {
  int32_t sequence = 0;
  int32_t slot = -1;
  int32_t token = 0;  // the window's first
  int32_t window = 0;
  int32_t ring_first = 0;  // physical row of the oldest that the step needs
  int32_t history = 0;     // rows before the window
  int32_t folded = 0;      // the first of these
  int32_t conv_first = 0;  // physical row of the window's first convolution input
};

// The sequences of a call.
struct SequenceBatch {
  int64_t sequences = 0;
  const int32_t* query_start = nullptr;  // [sequences + 1]
  const int32_t* slot = nullptr;         // [sequences]
  const Cursor* cursors = nullptr;       // [slots], as the begin of this step left them
  RingConfig ring;
  // Tree windows: [tokens] the index within its window of a token's parent, which comes before it;
  // -1 is the last committed token. Null: every window is a chain.
  const int32_t* parent = nullptr;
  // [sequences] of a device, 16 byte aligned, in the order in which layers take them. begin_steps
  // forms them; null: layers ask the cursors.
  SequencePlan* plan = nullptr;
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
  const float* g = nullptr;  // [tokens, HV] log decay (not Kimi Delta)

  // Kimi Delta only.
  const void* gate = nullptr;  // [tokens, HV, K] raw gates, activation dtype
  int64_t gate_stride = 0;     // from token to token
  ChannelGate channel_gate;

  // Both may be null: o = (S q + skip v) silu(z).
  const float* skip = nullptr;  // [HV] Mamba-2's D
  const void* z = nullptr;      // [tokens, HV, V] activation dtype
  int64_t z_stride = 0;         // from token to token

  StochasticRounding rounding;

  void* o = nullptr;  // [tokens, HV, V]
  DType o_dtype = DType::kFloat32;
};

// The same over long windows, in chunks: reads and writes the checkpoint, leaves the ring alone.
// The rings of all slots must be empty.
struct RecurrentPrefillParams : RecurrentStepParams {};

// Folds every ring row of the given slots into their checkpoints, or into those of other slots: a
// snapshot, which leaves the source as it was. Never changes later results.
struct RecurrentFoldParams {
  RecurrentShape shape;
  SequenceBatch batch;  // query_start and parent are not read
  RecurrentState state;
  ChannelGate channel_gate;
  StochasticRounding rounding;           // keyed by the source
  const int32_t* target_slot = nullptr;  // [sequences]; null: in place
};

// Zeroes what a new sequence starts from: checkpoint and read copy of slot[s], and the
// convolution's inputs where `conv_inputs` is given. Rings need none: an empty one is not read.
struct SlotClearParams {
  RecurrentShape shape;
  SequenceBatch batch;  // query_start, cursors and parent are not read
  RecurrentState state;
  void* conv_inputs = nullptr;  // [slots, conv_rows, channels], activation dtype
  int64_t channels = 0;
};

// Copies all that a layer keeps of slot[s] to target_slot[s]: checkpoint, read copy, ring, and the
// convolution's inputs where `conv_inputs` is given. No slot is both source and target.
struct SlotCopyParams {
  RecurrentShape shape;
  SequenceBatch batch;  // query_start, cursors and parent are not read
  RecurrentState state;
  void* conv_inputs = nullptr;  // [slots, conv_rows, channels], activation dtype
  int64_t channels = 0;
  const int32_t* target_slot = nullptr;  // [sequences]
};

// Moves the rows of an accepted path of a tree window together, ascending and in place, before the
// commit: row path[query_start[s] + i] of the window becomes row i for i < accepted[s].
struct CompactParams {
  RecurrentShape shape;
  SequenceBatch batch;
  RecurrentState state;
  void* conv_inputs = nullptr;  // as in SlotCopyParams
  int64_t channels = 0;
  const int32_t* path = nullptr;      // [tokens], strictly ascending within a window
  const int32_t* accepted = nullptr;  // [sequences]
};

// Speculative decoding as engines without a ring do it, the baseline to compare with: every token
// of a window updates the state and stores all of it, token i in snapshot i. The window starts from
// snapshot `source[s]`, that of the last accepted token, or from the checkpoint where it is -1.
// Checkpoint, ring, read copy and cursors are not written; windows are chains of at most
// max_window.
struct SnapshotStepParams : RecurrentStepParams {
  void* snapshots = nullptr;        // [slots, max_window, HV, V, K] checkpoint dtype
  const int32_t* source = nullptr;  // [sequences]
};

// The causal depthwise convolution and SiLU in front of a recurrent layer, over the same windows:
//
//   y[i, c] = silu(bias[c] + sum_j weight[j, c] x[i - (conv_kernel - 1) + j, c])
//
// Where the batch gives parents, the taps before a token's own are its nearest ancestors, then the
// committed inputs. Inputs are rounded to the activation dtype first. The input of the token at
// counter p is kept in row p mod conv_rows; those before the window are read from there.
struct ConvParams {
  SequenceBatch batch;
  int64_t channels = 0;
  DType activation_dtype = DType::kFloat32;
  DType x_dtype = DType::kFloat32;  // float32 or activation_dtype
  const void* x = nullptr;          // [tokens, channels] x_dtype
  int64_t x_stride = 0;             // from token to token
  const float* weight = nullptr;    // [conv_kernel, channels], the last tap is the current token's
  const float* bias = nullptr;      // [channels], may be null
  void* inputs = nullptr;           // [slots, conv_rows, channels] activation dtype
  void* y = nullptr;                // [tokens, channels] activation dtype
};

// The scalar gates of a layer from its raw projections:
//
//   Mamba-2      b = clamp(softplus(strength + bias), min, max)   g = b a
//   Gated Delta  b = sigmoid(strength)                            g = a softplus(decay + bias)
//   Kimi Delta   b = sigmoid(strength)
struct ScalarGates {
  const void* strength = nullptr;  // [tokens, HV] Mamba-2's dt, else beta; projected_dtype
  const void* decay = nullptr;     // [tokens, HV] Gated Delta's alpha; projected_dtype
  int64_t stride = 0;              // from token to token, of both
  const float* bias = nullptr;     // [HV] dt_bias (not Kimi Delta)
  const float* a = nullptr;        // [HV] -exp(A_log) (not Kimi Delta)
  float min = 0, max = 0;          // Mamba-2's time_step_limit
};

enum class GateActivation : uint8_t { kSilu, kSigmoid };

// The gate and the norm behind the recurrence, over groups of consecutive channels of a token:
// norm(o act(z)) weight where gate_first is set, else (norm(o) weight) act(z), with
// norm(x) = x / sqrt(mean(x^2) + eps). Without a weight nothing is normalised: o act(z).
struct OutputNorm {
  const void* z = nullptr;        // [tokens, HV, V] projected_dtype
  int64_t z_stride = 0;           // from token to token
  const float* weight = nullptr;  // [HV V], or [group_dim] if weight_per_group
  int64_t group_dim = 0;          // divides HV V
  bool weight_per_group = false;  // the groups share it
  bool gate_first = false;
  GateActivation activation = GateActivation::kSilu;
  float eps = 0;
};

// The convolution of a layer: ConvParams over channels that are v, k and q side by side.
struct LayerConv {
  int64_t channels = 0;           // HV V + 2 H K
  int64_t v = 0, k = 0, q = 0;    // the first channel of each
  const void* x = nullptr;        // [tokens, channels] projected_dtype
  int64_t x_stride = 0;           // from token to token
  const float* weight = nullptr;  // [conv_kernel, channels]
  const float* bias = nullptr;    // [channels], may be null
  void* inputs = nullptr;         // [slots, conv_rows, channels] activation dtype
};

// One decode step of a whole layer, from what its projection gives to what its output projection
// takes: causal_conv, the gates, recurrent_step and the gated norm, with the roundings that those
// have as ops of their own: v, k and q to the activation dtype, all else in fp32.
struct LayerStepParams {
  RecurrentShape shape;
  Route route = Route::kOutputOnly;
  SequenceBatch batch;
  RecurrentState state;
  // Rows that x, z, y and the raw gates have. Those outside all windows are not touched.
  int64_t tokens = 0;
  DType projected_dtype = DType::kFloat32;  // float32 or the activation dtype
  LayerConv conv;
  ScalarGates gates;
  // As in RecurrentStepParams.
  const void* gate = nullptr;
  int64_t gate_stride = 0;
  ChannelGate channel_gate;
  const float* skip = nullptr;
  StochasticRounding rounding;

  OutputNorm norm;
  void* y = nullptr;  // [tokens, HV, V]
  DType y_dtype = DType::kFloat32;
};

}  // namespace replayssm
