// Arguments of a layer's smaller ops, where every backend takes the same.
#pragma once

#include <cstdint>

#include "replayssm/ops.h"

namespace replayssm {

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

// The gated normalisation behind a recurrent layer, over groups of consecutive channels.
struct GatedNormParams {
  const float* x = nullptr;     // [rows, groups * group_dim]
  const float* gate = nullptr;  // the same shape, rows gate_stride apart
  int64_t gate_stride = 0;
  const float* weight = nullptr;  // [groups * group_dim]; null = no normalisation, gate only
  int64_t rows = 0;
  int64_t groups = 0;
  int64_t group_dim = 0;
  bool weight_per_group = false;  // weight is [group_dim], shared by the groups
  bool gate_first = false;  // norm(x * act(gate)) * weight; else (norm(x) * weight) * act(gate)
  GateActivation activation = GateActivation::kSilu;
  float eps = 0;
  void* y = nullptr;  // [rows, groups * group_dim] in `dtype`
  DType dtype = DType::kFloat32;
};

// The keys and values of one attention layer: blocks of `block_size` tokens.
struct KvCache {
  void* k = nullptr;  // [blocks, kv_heads, block_size, head_dim] in `dtype`
  void* v = nullptr;  // the same; may be k itself, then every value is its key
  DType dtype = DType::kFloat32;
  int64_t block_size = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
};

// Sequence s of the batch has `position[s]` tokens in the cache and brings the tokens
// [query_start[s], query_start[s + 1]), none where it is padding. Its block b is
// block_table[s * block_table_stride + b].
struct KvBatch {
  int64_t sequences = 0;
  const int32_t* query_start = nullptr;  // [sequences + 1]
  const int64_t* position = nullptr;     // [sequences]
  const int32_t* block_table = nullptr;  // [sequences, block_table_stride]
  int64_t block_table_stride = 0;
  // [tokens] of windows that are trees, at most 64 tokens each: bit i is set where a token sees
  // token i of its window. Null: it sees those before it and itself.
  const uint64_t* ancestors = nullptr;
};

struct RouterParams {
  const float* logits = nullptr;           // [rows, experts]
  const float* correction_bias = nullptr;  // [experts], used for the selection only; may be null
  int64_t rows = 0;
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t groups = 1;         // experts compete in `groups` groups ...
  int64_t top_groups = 1;     // ... of which the best `top_groups` (sum of their two best) stay
  bool sigmoid = false;       // scores: sigmoid of the logits, else softmax over all experts
  bool renormalize = true;    // the chosen weights are divided by their sum
  float scale = 1;            // and multiplied by this
  int32_t* expert = nullptr;  // [rows, top_k]
  float* weight = nullptr;    // [rows, top_k]
};

}  // namespace replayssm
