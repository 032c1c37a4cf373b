// Attention over a paged cache on CUDA devices. The rules of dense.h hold.
//
// A step of a model: plan_attention once, then in every attention layer prepare_attention and
// paged_attention. Sequences that decode and sequences that prefill may share one call, but are
// faster in two, each over its own part of the batch: query_start + first, position + first,
// block_table + first * stride, the same q and out.
#pragma once

#include "ops/cuda/dense.h"
#include "ops/layer_params.h"

namespace replayssm::cuda {

// Keys and values of the new tokens go into the cache, queries where attention reads them, in one
// launch. Every head of q and k is normalised (where it has a weight) and rotated by its token's
// position (half-split form, angles are fp32 products, where rotary_dim > 0).
struct AttentionInputParams {
  InRows q{};  // [tokens, heads, head_dim]; data may be null: no queries
  InRows k{};  // [tokens, kv_heads, head_dim]
  InRows v{};  // the same; not read where the cache's values are its keys
  int64_t tokens = 0;
  int64_t heads = 0;
  const float* q_norm = nullptr;             // [norm_dim], may be null
  const float* k_norm = nullptr;             // [norm_dim], may be null
  int64_t norm_dim = 0;                      // leading elements of a head that a norm covers
  float eps = 0;                             //
  const float* inverse_frequency = nullptr;  // [rotary_dim / 2]
  int64_t rotary_dim = 0;                    // leading elements of a head that are rotated
  KvCache cache;
  KvBatch batch;  // its tokens are those of `q`; tokens behind the last sequence's are padding
  const int32_t* depth = nullptr;  // [tokens] of trees: a token is rotated by position + depth
  OutRows q_out{};                 // [tokens, heads, head_dim]
};
void prepare_attention(const AttentionInputParams& params, cudaStream_t stream);

// The most that the calls of a plan are used for. It decides, together with each sequence's own
// lengths, how the work is cut into pieces: a tile of one sequence's queries and a range of its
// keys. Neighbours change no bits of a sequence.
struct AttentionShape {
  int64_t sequences = 0;
  int64_t tokens = 0;       // over all sequences
  int64_t max_window = 0;   // new tokens of a sequence
  int64_t max_context = 0;  // tokens of a sequence, new ones included; longer ones are served too
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
};
// Bytes that plan_attention fills for the layers of a step, and those that paged_attention needs
// besides; the latter serve all layers of a stream.
int64_t attention_plan_bytes(const AttentionShape& shape);
int64_t attention_workspace_bytes(const AttentionShape& shape);

// plan: aligned to 16. Once per step, behind what writes `batch`, whose arrays then stay as they
// are until the last layer is done.
void plan_attention(const AttentionShape& shape, const KvBatch& batch, void* plan,
                    cudaStream_t stream);

// Causal attention of the new tokens over cache and window (already stored):
// out = softmax(scale q K^T) V, times sigmoid(gate) where there is one. `heads` is a multiple of
// kv_heads; head_dim is 64, 80, 96, 128, 192, 256 or 576. Rows behind the last sequence's tokens
// are left as they are.
struct AttentionParams {
  AttentionShape shape;  // as planned
  KvCache cache;
  KvBatch batch;
  InRows q{};  // [tokens, heads, head_dim] in the cache's type, rows at multiples of 16 bytes
  float scale = 1;
  InRows gate{};  // [tokens, heads, head_dim]; data may be null
  OutRows out{};  // [tokens, heads, head_dim]
  const void* plan = nullptr;
  void* workspace = nullptr;  // aligned to 16
};
void paged_attention(const AttentionParams& params, cudaStream_t stream);

// Moves the cached tokens of accepted paths of tree windows together, ascending and in place: the
// token at row path[query_start[s] + i] of the window becomes row i for i < accepted[s].
void compact_kv(const KvCache& cache, const KvBatch& batch, const int32_t* path,
                const int32_t* accepted, cudaStream_t stream);

}  // namespace replayssm::cuda
