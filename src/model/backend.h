// What a model's layers ask of a device: memory, products with packed weights and the ops between
// them. One implementation per kind of device; the layers (layers.h) are written once.
//
// Pointers of ops are to the backend's memory. Activations between ops are fp32; what feeds a
// matrix product or a cache is rounded to the activation dtype (`void*`). Work is done in order,
// but need not be done when a call returns.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/buffer.h"
#include "model/model.h"
#include "model/tensor.h"
#include "model/weights.h"
#include "ops/layer_params.h"
#include "replayssm/ops.h"

namespace replayssm {

// y = x W^T + bias, with the weight packed for a device.
class Product {
 public:
  Product(int64_t in_features, int64_t out_features, int64_t heads)
      : in_(in_features), out_(out_features), heads_(heads) {}
  virtual ~Product() = default;

  int64_t in_features() const { return in_; }    // of a head
  int64_t out_features() const { return out_; }  // of a head
  int64_t heads() const { return heads_; }
  virtual int64_t weight_bytes() const = 0;

  // x: [rows, heads, x_head_stride] in the weight's dtype, of which in_features are read; y: [rows,
  // heads, y_head_stride], of which out_features are written.
  virtual void apply(const void* x, int64_t x_head_stride, int64_t rows, float* y,
                     int64_t y_head_stride) const = 0;

 private:
  int64_t in_, out_, heads_;
};

// Projections of the same input, stacked: blocks of rows [rows, in_features], absent ones left out.
struct ProductWeights {
  std::vector<const Tensor*> blocks;
  int64_t in_features = 0;
  std::vector<float> bias{};  // of all rows, or empty
  DType dtype = DType::kFloat32;
  int64_t heads = 1;  // the rows are those of so many heads, each with inputs of its own
};

// The routed experts of a layer.
class Experts {
 public:
  virtual ~Experts() = default;
  virtual int64_t weight_bytes() const = 0;
};

struct ExpertMixParams {
  const Experts* experts = nullptr;
  const void* x = nullptr;  // [tokens, width]
  int64_t tokens = 0;
  int64_t width = 0;
  int64_t top_k = 0;
  const int32_t* expert = nullptr;  // [tokens, top_k]
  const float* weight = nullptr;    // [tokens, top_k]
  float* y = nullptr;               // [tokens, width]: the weighted sum
};

// hidden += second_scale * second, then scale * delta; y = norm(hidden) * weight.
struct AddNormParams {
  float* hidden = nullptr;       // [rows, dim]
  const float* delta = nullptr;  // [rows, dim] or null
  const float* second = nullptr;
  float scale = 1, second_scale = 1;
  const float* weight = nullptr;       // [dim]
  const int32_t* row_index = nullptr;  // the rows of hidden that y has, which nobody reads after
  int64_t hidden_rows = 0;             // that; null: all
  int64_t rows = 0;                    // of y
  int64_t dim = 0;
  float eps = 0;
  void* y = nullptr;        // [rows, dim]
  float* y_wide = nullptr;  // the same in fp32; may be null
};

enum class MlpGate : uint8_t { kSwiGlu, kReluSquared };

struct GatedProductParams {
  const Product* up = nullptr;  // its outputs: gates, then as many values; or values alone
  const void* x = nullptr;      // [rows, in_features]
  int64_t rows = 0;
  MlpGate gate = MlpGate::kSwiGlu;
  float scale = 1;           // of the gates
  float* product = nullptr;  // [rows, out_features] scratch
  int64_t dim = 0;
  void* y = nullptr;  // [rows, dim]
};

// Causal attention of a pass's tokens over cache and window.
struct AttentionParams {
  // Rows `stride` apart: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]. q and k
  // may be overwritten.
  float* q = nullptr;
  int64_t q_stride = 0;
  float* k = nullptr;
  const float* v = nullptr;
  int64_t kv_stride = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  const float* q_norm = nullptr;  // [norm_dim] of every head's leading elements; may be null
  const float* k_norm = nullptr;
  int64_t norm_dim = 0;
  float eps = 0;
  const float* inverse_frequency = nullptr;
  int64_t rotary_dim = 0;
  float scale = 1;
  const float* gate = nullptr;  // rows q_stride apart; the output is scaled by its sigmoid
  void* cache_k = nullptr;      // [blocks, kv_heads, block_size, head_dim]
  void* cache_v = nullptr;      // the same memory where keys serve as values
  int64_t block_size = 0;
  void* out = nullptr;  // [tokens, heads, head_dim]
};

// The index arrays of a forward pass in the backend's memory (model.h: Batch). A captured pass has
// places for more tokens than there are: their ids and logit_tokens are -1.
struct PassArrays {
  int64_t tokens = 0;
  int64_t sequences = 0;
  int64_t decodes = 0;
  int64_t logits = 0;
  const int32_t* token_ids = nullptr;
  const int32_t* query_start = nullptr;
  const int32_t* slot = nullptr;
  const int64_t* position = nullptr;
  const int32_t* block_table = nullptr;
  const int32_t* logit_tokens = nullptr;
  const int32_t* drawn = nullptr;  // by the pass before: what ids of -2 - r stand for
  int64_t block_table_stride = 0;
  int64_t block_size = 0;
  int64_t longest_window = 0;    // of the prefilling sequences
  SequencePlan* plan = nullptr;  // where every sequence decodes, as begin_steps forms it
  int64_t longest_step = 1;      // of the decoding sequences, or more
  // Tree windows: SequenceBatch::parent, and per token the ancestors within its window (bit i:
  // token i of the window, itself included) and how many they are but itself. Null: chains.
  const int32_t* parent = nullptr;
  const uint64_t* ancestors = nullptr;
  const int32_t* depth = nullptr;
  const int32_t* source = nullptr;      // Batch::source
  const int32_t* hidden_row = nullptr;  // HeadBatch::hidden_row
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual Memory& memory() = 0;
  virtual DType dtype() const = 0;  // of activations

  virtual std::unique_ptr<Product> make_product(const ProductWeights& weights) = 0;
  virtual std::unique_ptr<Experts> make_experts(const std::vector<MlpWeights>& weights,
                                                int64_t width, MlpGate gate) = 0;

  // Ops on rows.
  virtual void embed(const void* table, const int32_t* ids, int64_t rows, int64_t dim, float scale,
                     float* out) = 0;
  virtual void add_norm(const AddNormParams& params) = 0;
  // norm.delta = product x, then add_norm, timed: norm.delta is left alone and norm.y may be for
  // products alone. Returns false, with nothing done, where that takes a call for each.
  virtual bool product_add_norm(const Product& /*product*/, const void* /*x*/,
                                const AddNormParams& /*norm*/) {
    return false;
  }
  virtual void gated_norm(const GatedNormParams& params) = 0;
  // y = gate(up x), timed.
  virtual void gated_product(const GatedProductParams& params) = 0;
  virtual void scale_columns(float* x, const float* scale, int64_t rows, int64_t dim) = 0;
  virtual void round_rows(const float* x, int64_t x_stride, int64_t rows, int64_t dim, void* y) = 0;
  // [rows, heads, dim], heads apart as said.
  virtual void copy_heads(const float* x, int64_t x_stride, int64_t x_head_stride, int64_t rows,
                          int64_t heads, int64_t dim, float* y, int64_t y_head_stride) = 0;
  virtual void mamba2_gates(const Mamba2GateParams& params) = 0;
  virtual void delta_gates(const DeltaGateParams& params) = 0;

  // Ops on the sequences of the pass that began last.
  virtual void begin_pass(const PassArrays& arrays, const StateView& state) = 0;
  virtual void conv(const ConvParams& params) = 0;
  virtual void recurrent_step(const RecurrentStepParams& params) = 0;
  virtual void recurrent_prefill(const RecurrentPrefillParams& params) = 0;
  virtual void snapshot_step(const SnapshotStepParams& params) = 0;
  // Of one layer, behind the pass whose tree windows are committed.
  virtual void compact(const CompactParams& params) = 0;
  virtual void compact_kv(const KvCache& cache, const KvBatch& batch, const int32_t* path,
                          const int32_t* accepted) = 0;
  // Whether a pass of decoding sequences alone takes layer_step in place of the ops that it is made
  // of.
  virtual bool fuses(const LayerStepParams& /*params*/) const { return false; }
  virtual void layer_step(const LayerStepParams& /*params*/) {}
  virtual void attend(const AttentionParams& params) = 0;
  virtual void route_experts(const RouterParams& params) = 0;
  virtual void mix_experts(const ExpertMixParams& params) = 0;
  // y += sigmoid(gate) * x, gate: [rows] or null for a factor of 1.
  virtual void add_gated(const float* x, const float* gate, int64_t rows, int64_t dim,
                         float* y) = 0;

  // What work is enqueued on; null where it is done at once.
  virtual void* stream_handle() const { return nullptr; }

  // The time between these calls is a stage's.
  virtual void start_stage() = 0;
  virtual void end_stage(Stage stage) = 0;
};

}  // namespace replayssm
