// Products with a model's weights on the host.

#include <algorithm>
#include <cstring>

#include "model/cpu/cpu_backend.h"
#include "ops/cpu/linear.h"

namespace replayssm {
namespace {

class CpuProduct final : public Product {
 public:
  CpuProduct(const ProductWeights& weights, int64_t rows, ThreadPool& pool)
      : Product(weights.in_features, rows / weights.heads, weights.heads), pool_(pool) {
    const float* bias = weights.bias.empty() ? nullptr : weights.bias.data();
    if (weights.heads == 1) {
      std::vector<Tensor> held;
      std::vector<cpu::WeightRows> blocks;
      for (const Tensor* block : weights.blocks) {
        if (!*block) continue;
        const Tensor& there = held.emplace_back(block->on_host());
        blocks.push_back({there.data, there.dtype, there.elements() / weights.in_features});
      }
      linear_.emplace_back(blocks, weights.in_features, weights.dtype, pool, bias);
      return;
    }
    const Tensor stacked = weights.blocks.front()->on_host();
    const int64_t head_bytes = out_features() * in_features() * dtype_bytes(stacked.dtype);
    for (int64_t h = 0; h < heads(); ++h) {
      linear_.emplace_back(std::vector<cpu::WeightRows>{{stacked.data + h * head_bytes,
                                                         stacked.dtype, out_features()}},
                           weights.in_features, weights.dtype, pool);
    }
    element_bytes_ = dtype_bytes(weights.dtype);
  }

  int64_t weight_bytes() const override {
    int64_t bytes = 0;
    for (const cpu::Linear& head : linear_) bytes += head.weight_bytes();
    return bytes;
  }

  void apply(const void* x, int64_t x_head_stride, int64_t rows, float* y,
             int64_t y_head_stride) const override {
    const auto* bytes = static_cast<const std::byte*>(x);
    for (int64_t h = 0; h < heads(); ++h) {
      linear_[static_cast<size_t>(h)].apply(bytes + h * x_head_stride * element_bytes_,
                                            heads() * x_head_stride, rows, y + h * y_head_stride,
                                            heads() * y_head_stride, pool_);
    }
  }

 private:
  ThreadPool& pool_;
  std::vector<cpu::Linear> linear_;  // of each head
  int64_t element_bytes_ = 0;
};

struct CpuExperts final : Experts {
  struct Expert {
    std::unique_ptr<Product> up, down;
  };
  std::vector<Expert> experts;
  MlpGate gate = MlpGate::kSwiGlu;

  int64_t weight_bytes() const override {
    int64_t bytes = 0;
    for (const Expert& expert : experts) bytes += weight_bytes_of(expert.up, expert.down);
    return bytes;
  }
};

}  // namespace

std::unique_ptr<Product> CpuBackend::make_product(const ProductWeights& weights) {
  int64_t rows = 0;
  for (const Tensor* block : weights.blocks) {
    if (*block) rows += block->elements() / weights.in_features;
  }
  return std::make_unique<CpuProduct>(weights, rows, pool_);
}

std::unique_ptr<Experts> CpuBackend::make_experts(const std::vector<MlpWeights>& weights,
                                                  int64_t width, MlpGate gate) {
  auto packed = std::make_unique<CpuExperts>();
  packed->gate = gate;
  for (const MlpWeights& expert : weights) {
    const int64_t intermediate = expert.up.elements() / width;
    std::vector<float> bias = floats_of(expert.gate_bias), up_bias = floats_of(expert.up_bias);
    bias.insert(bias.end(), up_bias.begin(), up_bias.end());
    packed->experts.push_back({make_product({.blocks = {&expert.gate, &expert.up},
                                             .in_features = width,
                                             .bias = std::move(bias),
                                             .dtype = dtype_}),
                               make_product({.blocks = {&expert.down},
                                             .in_features = intermediate,
                                             .bias = floats_of(expert.down_bias),
                                             .dtype = dtype_})});
  }
  return packed;
}

void CpuBackend::mix_experts(const ExpertMixParams& p) {
  const auto& packed = static_cast<const CpuExperts&>(*p.experts);
  const int64_t row_bytes = p.width * dtype_bytes(dtype_);
  std::fill_n(p.y, p.tokens * p.width, 0.0f);
  std::byte* gathered = gathered_.get(p.tokens * row_bytes);
  float* out = expert_out_.get(p.tokens * p.width);
  std::vector<std::vector<int64_t>> choices(packed.experts.size());
  for (int64_t i = 0; i < p.tokens * p.top_k; ++i)
    choices[static_cast<size_t>(p.expert[i])].push_back(i);
  for (size_t expert = 0; expert < choices.size(); ++expert) {
    const auto& mine = choices[expert];
    if (mine.empty()) continue;
    const auto rows = static_cast<int64_t>(mine.size());
    for (size_t r = 0; r < mine.size(); ++r)
      std::memcpy(gathered + r * row_bytes,
                  static_cast<const std::byte*>(p.x) + mine[r] / p.top_k * row_bytes,
                  static_cast<size_t>(row_bytes));
    const auto& [up, down] = packed.experts[expert];
    const int64_t intermediate = down->in_features();
    float* raised = expert_up_.get(rows * up->out_features());
    std::byte* activated = expert_activated_.get(rows * intermediate * dtype_bytes(dtype_));
    start_stage();
    up->apply(gathered, p.width, rows, raised, up->out_features());
    end_stage(Stage::kMatmul);
    start_stage();
    mlp_gate(packed.gate, raised, 1, rows, intermediate, activated);
    end_stage(Stage::kOther);
    start_stage();
    down->apply(activated, intermediate, rows, out, p.width);
    end_stage(Stage::kMatmul);
    start_stage();
    for (size_t r = 0; r < mine.size(); ++r) {
      float* row = p.y + mine[r] / p.top_k * p.width;
      for (int64_t i = 0; i < p.width; ++i) row[i] += p.weight[mine[r]] * out[r * p.width + i];
    }
    end_stage(Stage::kOther);
  }
}

}  // namespace replayssm
