// A model's layers packed for a backend, and their forward passes.
#pragma once

#include <algorithm>
#include <vector>

#include "core/buffer.h"
#include "model/backend.h"
#include "model/model.h"
#include "model/weights.h"

namespace replayssm {

// A grow-only array: what a pass needs is allocated once and kept.
template <class T>
class Scratch {
 public:
  explicit Scratch(Memory& memory) : memory_(memory) {}

  T* get(int64_t count) {
    if (count > array_.size()) {
      const int64_t headroom = array_.size() + array_.size() / 4;
      array_ = {};
      array_ = Array<T>(std::max(count, headroom), memory_);
    }
    return array_.data();
  }

 private:
  Memory& memory_;
  Array<T> array_;
};

// The last product of a layer, which awaits the norm that adds it to the residual stream.
struct PendingProduct {
  const Product* product = nullptr;  // null: there is none
  const void* x = nullptr;
  int64_t rows = 0;
  float* y = nullptr;
};

// What the layers of one pass share. Activations between ops are fp32; what feeds a matrix product
// is rounded to the activation dtype (byte arrays).
struct Context {
  // `ranks`: null where there is one.
  Context(const ModelConfig& config, Backend& backend, Communicator* ranks)
      : config(config), backend(backend), communicator(ranks ? *ranks : single_rank) {}

  const ModelConfig& config;
  Backend& backend;
  SingleRank single_rank;
  Communicator& communicator;

  // The pass at hand.
  PassArrays arrays;
  const StateView* state = nullptr;
  PendingProduct pending;

  template <class T>
  using Kept = Scratch<T>;
  Memory& memory = backend.memory();
  Kept<float> hidden{memory}, normed_wide{memory}, projected{memory}, raised{memory}, mixed{memory},
      delta{memory}, second_delta{memory}, shared{memory}, latent{memory}, b{memory}, g{memory},
      router_logits{memory}, expert_weight{memory};
  Kept<float> kept_hidden{memory};   // [tokens, hidden] of the last pass that kept them
  Kept<float> draft_hidden{memory};  // [logits, hidden] of the draft head's last pass
  Kept<std::byte> normed{memory}, conv_out{memory}, activated{memory}, latent_in{memory},
      rounded{memory};
  Kept<int32_t> expert{memory};

  DType dtype() const { return backend.dtype(); }
  int64_t element_bytes() const { return dtype_bytes(dtype()); }
  int64_t tokens() const { return arrays.tokens; }
  bool is_cut() const { return communicator.shard().world > 1; }
};

// Adds the time of its scope to one of the stages.
class StageTimer {
 public:
  StageTimer(Context& context, Stage stage) : backend_(context.backend), stage_(stage) {
    backend_.start_stage();
  }
  ~StageTimer() { backend_.end_stage(stage_); }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  Backend& backend_;
  Stage stage_;
};

using ProductPtr = std::unique_ptr<Product>;

// All elements of a tensor as fp32; none of an absent one.
std::vector<float> floats_of(const Tensor& tensor);
// Moves host values to the backend.
Array<float> placed(Array<float> values, Context& context);
// Copies fp32 parameters out of a tensor, times `scale`, to the backend.
Array<float> pack_floats(const Tensor& tensor, Context& context, float scale = 1);
// Stacks projections of the same input into one product; absent ones are left out.
ProductPtr pack_product(const std::vector<const Tensor*>& blocks, int64_t in_features,
                        Context& context, std::vector<float> bias = {});
// y = product, timed: x is [rows, in_features].
void project(const Product& product, const void* x, int64_t rows, float* y, Context& context);
// The same for a layer's last product, whose y only a norm reads: left to add_norm or the next
// project.
void project_last(const Product& product, const void* x, int64_t rows, float* y, Context& context);
// The norm behind a layer, timed.
void add_norm(const AddNormParams& params, Context& context);

// Bytes of products that may be absent.
template <class... Products>
int64_t weight_bytes_of(const Products&... products) {
  return (int64_t{0} + ... + (products ? products->weight_bytes() : 0));
}

// Each layer maps `normed`, [tokens, hidden] in the activation dtype, to `delta`, [tokens, hidden].
class Mamba2Layer {
 public:
  Mamba2Layer(const Mamba2Weights& weights, Context& context);
  // `index` counts the recurrent layers.
  void forward(int64_t index, const void* normed, float* delta, Context& context) const;
  int64_t weight_bytes() const { return weight_bytes_of(in_proj_, out_proj_); }

 private:
  ProductPtr in_proj_, out_proj_;
  Array<float> conv_weight_, conv_bias_, dt_bias_, a_, d_;
  Array<float> norm_;              // empty without a norm
  Array<float> projection_scale_;  // of in_proj_'s columns; empty where all are 1
};

class GatedDeltaLayer {
 public:
  GatedDeltaLayer(const GatedDeltaWeights& weights, Context& context);
  void forward(int64_t index, const void* normed, float* delta, Context& context) const;
  int64_t weight_bytes() const { return weight_bytes_of(in_proj_, out_proj_); }

 private:
  ProductPtr in_proj_, out_proj_;  // q | k | v | z | beta | alpha
  Array<float> conv_weight_, dt_bias_, a_, norm_;
};

class KimiDeltaLayer {
 public:
  KimiDeltaLayer(const KimiDeltaWeights& weights, Context& context);
  void forward(int64_t index, const void* normed, float* delta, Context& context) const;
  int64_t weight_bytes() const;

 private:
  // The second product of a gate's two. down: rows `stride` apart; result: [tokens, inner].
  const float* raise(const Product& up, const float* down, int64_t stride, Context& context) const;

  ProductPtr in_proj_;  // q | k | v | beta | decay_down | gate_down
  ProductPtr decay_up_, gate_up_, out_proj_;
  Array<float> conv_weight_, dt_bias_, a_, norm_;
};

class AttentionLayer {
 public:
  AttentionLayer(const AttentionWeights& weights, Context& context);
  // `index` counts the attention layers.
  void forward(int64_t index, const void* normed, float* delta, Context& context) const;
  int64_t weight_bytes() const { return weight_bytes_of(in_proj_, out_proj_); }

 private:
  ProductPtr in_proj_, out_proj_;  // q | k | v | gate
  Array<float> q_norm_, k_norm_, inverse_frequency_;
};

// The keys and values of all heads are one latent vector and one shared vector per token: queries
// are taken into the latent space and what they read is taken out of it, so that attention works on
// the cached vectors as they are.
class LatentAttentionLayer {
 public:
  LatentAttentionLayer(const LatentAttentionWeights& weights, Context& context);
  // `index` counts the attention layers.
  void forward(int64_t index, const void* normed, float* delta, Context& context) const;
  int64_t weight_bytes() const;

 private:
  // q: [tokens, heads, query_dim], tokens `stride` apart; result: [tokens, heads, cached].
  float* absorb(const float* q, int64_t stride, Context& context) const;

  ProductPtr in_proj_, out_proj_;  // q | latent | shared
  ProductPtr key_, value_up_;      // of all heads: into the latent space, and out of it
  Array<float> norm_;
};

class MlpLayer {
 public:
  MlpLayer() = default;
  MlpLayer(const MlpWeights& weights, int64_t in_features, Context& context, float gate_scale = 1);
  // x: [rows, in_features] in the activation dtype; y: [rows, in_features]. `last`: only a norm
  // reads y.
  void forward(const void* x, int64_t rows, float* y, bool last, Context& context) const;
  int64_t weight_bytes() const { return weight_bytes_of(up_, down_); }
  bool present() const { return up_ != nullptr; }

 private:
  ProductPtr up_, down_;  // gate | up
  int64_t intermediate_ = 0;
  float gate_scale_ = 1;
};

class MoeLayer {
 public:
  MoeLayer(const MoeWeights& weights, Context& context);
  // `normed_wide`: the same as `normed` in fp32, for the router.
  void forward(const void* normed, const float* normed_wide, float* delta, Context& context) const;
  int64_t weight_bytes() const;

 private:
  void choose(const float* normed_wide, Context& context) const;
  void run_experts(const void* x, int64_t width, float* y, Context& context) const;

  ProductPtr router_, shared_gate_, latent_in_, latent_out_;
  Array<float> correction_bias_;
  std::unique_ptr<Experts> experts_;
  MlpLayer shared_;
};

// How the model's MLPs are gated.
MlpGate mlp_gate_of(const ModelConfig& config);

}  // namespace replayssm
