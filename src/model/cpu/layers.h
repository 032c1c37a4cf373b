// A model's layers packed for the CPU, and their forward passes.
#pragma once

#include <chrono>
#include <vector>

#include "core/buffer.h"
#include "model/model.h"
#include "model/weights.h"
#include "ops/cpu/linear.h"

namespace replayssm::cpu {

// A grow-only array: what a pass needs is allocated once and kept.
template <class T>
class Scratch {
 public:
  T* get(int64_t count) {
    if (count > array_.size()) array_ = Array<T>(count + count / 4);
    return array_.data();
  }

 private:
  Array<T> array_;
};

// What the layers of one pass share. Activations between ops are fp32; what feeds a matrix product
// is rounded to the activation dtype (byte arrays).
struct Context {
  Context(const ModelConfig& config, DType dtype, ThreadPool& pool)
      : config(config), dtype(dtype), pool(pool) {}

  const ModelConfig& config;
  const DType dtype;
  ThreadPool& pool;
  StageTimes times;

  // The pass at hand.
  const Batch* batch = nullptr;
  const StateView* state = nullptr;
  int64_t tokens = 0;
  std::vector<int64_t> token_position;  // [tokens]

  Scratch<float> hidden, normed_wide, projected, raised, mixed, delta, second_delta, expert_out,
      latent, b, g;
  Scratch<std::byte> normed, conv_out, activated, gathered, latent_in, rounded;
  Scratch<float> workspace;
  Scratch<int32_t> expert;
  Scratch<float> expert_weight, router_logits;

  int64_t element_bytes() const { return dtype_bytes(dtype); }
};

// Adds the time of its scope to one of the stages.
class StageTimer {
 public:
  explicit StageTimer(double& seconds) : seconds_(seconds) {}
  ~StageTimer() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Copies fp32 parameters out of a tensor, times `scale`.
Array<float> pack_floats(const Tensor& tensor, float scale = 1);
// Stacks projections of the same input into one product; absent ones are left out.
Linear pack_linear(const std::vector<const Tensor*>& blocks, int64_t in_features, Context& context,
                   const Tensor* bias = nullptr);
// y += product, timed: x is [tokens, in_features] in the activation dtype.
void project(const Linear& linear, const void* x, float* y, Context& context);

// Each layer maps `normed`, [tokens, hidden] in the activation dtype, to `delta`, [tokens, hidden].
class Mamba2Layer {
 public:
  Mamba2Layer(const Mamba2Weights& weights, Context& context);
  // `index` counts the recurrent layers.
  void forward(int64_t index, const void* normed, float* delta, Context& context) const;
  int64_t weight_bytes() const { return in_proj_.weight_bytes() + out_proj_.weight_bytes(); }

 private:
  Linear in_proj_, out_proj_;
  Array<float> conv_weight_, conv_bias_, dt_bias_, a_, d_;
  Array<float> norm_;              // empty without a norm
  Array<float> projection_scale_;  // of in_proj_'s columns; empty where all are 1
};

class GatedDeltaLayer {
 public:
  GatedDeltaLayer(const GatedDeltaWeights& weights, Context& context);
  void forward(int64_t index, const void* normed, float* delta, Context& context) const;
  int64_t weight_bytes() const { return in_proj_.weight_bytes() + out_proj_.weight_bytes(); }

 private:
  Linear in_proj_, out_proj_;  // q | k | v | z | beta | alpha
  Array<float> conv_weight_, dt_bias_, a_, norm_;
};

class KimiDeltaLayer {
 public:
  KimiDeltaLayer(const KimiDeltaWeights& weights, Context& context);
  void forward(int64_t index, const void* normed, float* delta, Context& context) const;
  int64_t weight_bytes() const;

 private:
  // The second product of a gate's two. down: rows `stride` apart; result: [tokens, inner].
  const float* raise(const Linear& up, const float* down, int64_t stride, Context& context) const;

  Linear in_proj_;  // q | k | v | beta | decay_down | gate_down
  Linear decay_up_, gate_up_, out_proj_;
  Array<float> conv_weight_, dt_bias_, a_, norm_;
};

class AttentionLayer {
 public:
  AttentionLayer(const AttentionWeights& weights, Context& context);
  // `index` counts the attention layers.
  void forward(int64_t index, const void* normed, float* delta, Context& context) const;
  int64_t weight_bytes() const { return in_proj_.weight_bytes() + out_proj_.weight_bytes(); }

 private:
  Linear in_proj_, out_proj_;  // q | k | v | gate
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
  const float* absorb(const float* q, int64_t stride, Context& context) const;

  Linear in_proj_, out_proj_;           // q | latent | shared
  std::vector<Linear> key_, value_up_;  // per head: into the latent space, and out of it
  Array<float> norm_;
};

class MlpLayer {
 public:
  MlpLayer() = default;
  MlpLayer(const MlpWeights& weights, int64_t in_features, Context& context, float gate_scale = 1);
  // x: [rows, in_features] in the activation dtype; y: [rows, in_features].
  void forward(const void* x, int64_t rows, float* y, Context& context) const;
  int64_t weight_bytes() const { return up_.weight_bytes() + down_.weight_bytes(); }
  bool present() const { return intermediate_ > 0; }

 private:
  Linear up_, down_;  // gate | up
  int64_t intermediate_ = 0;
  Array<float> gate_scale_;  // of the gate's columns; empty where it is 1
};

class MoeLayer {
 public:
  MoeLayer(const MoeWeights& weights, Context& context);
  // `normed_wide`: the same as `normed` in fp32, for the router.
  void forward(const void* normed, const float* normed_wide, float* delta, Context& context) const;
  int64_t weight_bytes() const;

 private:
  void run_experts(const void* x, int64_t width, float* y, Context& context) const;

  Linear router_, shared_gate_, latent_in_, latent_out_;
  Array<float> correction_bias_;
  std::vector<MlpLayer> experts_;
  MlpLayer shared_;
};

}  // namespace replayssm::cpu
