// Products with a model's weights, and mixtures of experts, on a CUDA device.

#include "core/check.h"
#include "model/cuda/cuda_backend.h"
#include "ops/cuda/dense.h"
#include "ops/cuda/experts.h"
#include "ops/cuda/narrow.h"

namespace replayssm {
namespace {

// Matrices one behind another; absent ones are left out.
Buffer place_stacked(const std::vector<const Tensor*>& blocks, DType dtype, Memory& memory) {
  int64_t elements = 0;
  for (const Tensor* block : blocks) elements += *block ? block->elements() : 0;
  Buffer stacked(elements * dtype_bytes(dtype), memory);
  std::byte* next = stacked.as<>();
  for (const Tensor* block : blocks) {
    if (!*block) continue;
    write_tensor(*block, dtype, next, memory);
    next += block->elements() * dtype_bytes(dtype);
  }
  return stacked;
}

Array<float> place_floats(const std::vector<float>& values, Memory& memory) {
  Array<float> there(static_cast<int64_t>(values.size()), memory);
  if (!values.empty()) memory.write(there.data(), values.data(), there.bytes());
  return there;
}

class CudaProduct final : public Product {
 public:
  CudaProduct(const ProductWeights& weights, Buffer stacked, cuda::LinearRunner& runner,
              const CudaBackend& backend, Memory& memory, cudaStream_t stream)
      : Product(
            weights.in_features,
            stacked.bytes() / (weights.in_features * dtype_bytes(weights.dtype)) / weights.heads,
            weights.heads),
        dtype_(weights.dtype),
        weight_(std::move(stacked)),
        bias_(place_floats(weights.bias, memory)),
        runner_(runner),
        backend_(backend),
        stream_(stream) {}

  int64_t weight_bytes() const override { return weight_.bytes(); }

  void apply(const void* x, int64_t x_head_stride, int64_t rows, float* y,
             int64_t y_head_stride) const override {
    runner_.run(params(x, x_head_stride, rows, y, y_head_stride), stream_);
  }

  // Returns whether the gate has been applied, else the product is in p.product.
  bool apply_gated(const GatedProductParams& p) const {
    cuda::LinearParams linear = params(p.x, in_features(), p.rows, p.product, out_features());
    linear.activation = p.gate == MlpGate::kSwiGlu ? cuda::LinearActivation::kSwiGlu
                                                   : cuda::LinearActivation::kReluSquared;
    linear.scale = p.scale;
    linear.activated = p.y;
    return runner_.run(linear, stream_).activated;
  }

  // Returns of how many parts y is the sum.
  int64_t apply_parts(const void* x, int64_t rows, float* y, int64_t most_parts) const {
    cuda::LinearParams linear = params(x, in_features(), rows, y, out_features());
    linear.most_parts = most_parts;
    return runner_.run(linear, stream_).parts;
  }

  // Returns whether it is one that does; what is yet to come of the norm is then in p.squares.
  bool apply_residual(const void* x, int64_t rows, const cuda::ResidualSum& residual) const {
    cuda::LinearParams linear = params(x, in_features(), rows, nullptr, out_features());
    if (!cuda::fuses_norms(linear)) return false;
    linear.residual = residual;
    runner_.run(linear, stream_);
    return true;
  }

 private:
  cuda::LinearParams params(const void* x, int64_t x_head_stride, int64_t rows, float* y,
                            int64_t y_head_stride) const {
    return {.x = x,
            .x_head_stride = x_head_stride,
            .weight = weight_.as<>(),
            .bias = bias_.data(),
            .in_features = in_features(),
            .out_features = out_features(),
            .heads = heads(),
            .rows = rows,
            .dtype = dtype_,
            .y = y,
            .y_head_stride = y_head_stride,
            .norm = backend_.norm_of(x)};
  }

  DType dtype_;
  Buffer weight_;
  Array<float> bias_;
  cuda::LinearRunner& runner_;
  const CudaBackend& backend_;
  cudaStream_t stream_;
};

struct CudaExperts final : Experts {
  Buffer up, down;  // [experts, rows, columns]
  Array<float> up_bias, down_bias;
  int64_t count = 0, up_rows = 0, intermediate = 0;
  MlpGate gate = MlpGate::kSwiGlu;

  int64_t weight_bytes() const override { return up.bytes() + down.bytes(); }
};

}  // namespace

std::unique_ptr<Product> CudaBackend::make_product(const ProductWeights& weights) {
  return std::make_unique<CudaProduct>(weights,
                                       place_stacked(weights.blocks, weights.dtype, memory_),
                                       linear_, *this, memory_, stream_.get());
}

std::unique_ptr<Experts> CudaBackend::make_experts(const std::vector<MlpWeights>& weights,
                                                   int64_t width, MlpGate gate) {
  auto packed = std::make_unique<CudaExperts>();
  packed->gate = gate;
  packed->count = static_cast<int64_t>(weights.size());
  std::vector<const Tensor*> up, down;
  std::vector<float> up_bias, down_bias;
  for (const MlpWeights& expert : weights) {
    up.insert(up.end(), {&expert.gate, &expert.up});
    down.push_back(&expert.down);
    for (const auto& [bias, all] : {std::pair{&expert.gate_bias, &up_bias},
                                    {&expert.up_bias, &up_bias},
                                    {&expert.down_bias, &down_bias}}) {
      const auto values = floats_of(*bias);
      all->insert(all->end(), values.begin(), values.end());
    }
  }
  packed->up = place_stacked(up, dtype_, memory_);
  packed->down = place_stacked(down, dtype_, memory_);
  packed->up_bias = place_floats(up_bias, memory_);
  packed->down_bias = place_floats(down_bias, memory_);
  const int64_t row_bytes = width * dtype_bytes(dtype_) * packed->count;
  packed->up_rows = packed->up.bytes() / row_bytes;
  packed->intermediate = packed->down.bytes() / row_bytes;
  return packed;
}

bool CudaBackend::product_add_norm(const Product& product, const void* x, const AddNormParams& p) {
  if (p.row_index || p.second || product.out_features() != p.dim || p.rows > cuda::kMostNarrowRows)
    return false;
  if (product_and_sum(product, x, p)) return true;
  float* sums = sums_.get(p.rows * p.dim * cuda::kMostQuickParts);
  start_stage();
  const int64_t parts =
      static_cast<const CudaProduct&>(product).apply_parts(x, p.rows, sums, cuda::kMostQuickParts);
  end_stage(Stage::kMatmul);
  start_stage();
  add_norm(p, sums, parts);
  end_stage(Stage::kNorm);
  return true;
}

bool CudaBackend::product_and_sum(const Product& product, const void* x, const AddNormParams& p) {
  if (p.rows != 1 || p.y_wide) return false;
  const cuda::RowNorm norm{.squares = squares_.get(cuda::residual_parts(p.dim)),
                           .parts = cuda::residual_parts(p.dim),
                           .dim = p.dim,
                           .eps = p.eps};
  start_stage();
  const bool fused =
      static_cast<const CudaProduct&>(product).apply_residual(x, p.rows,
                                                              {.hidden = p.hidden,
                                                               .scale = p.scale,
                                                               .weight = p.weight,
                                                               .normed = p.y,
                                                               .squares = squares_.get(0)});
  end_stage(Stage::kMatmul);
  if (!fused) return false;
  normed_ = p.y;
  norm_ = norm;
  return true;
}

void CudaBackend::gated_product(const GatedProductParams& p) {
  start_stage();
  const bool gated = static_cast<const CudaProduct&>(*p.up).apply_gated(p);
  end_stage(Stage::kMatmul);
  if (gated) return;
  start_stage();
  mlp_gate(p.gate, p.product, p.scale, p.rows, p.dim, p.y);
  end_stage(Stage::kOther);
}

void CudaBackend::route_experts(const RouterParams& params) {
  cuda::route_experts(params, stream_.get());
}

void CudaBackend::mix_experts(const ExpertMixParams& p) {
  const auto& e = static_cast<const CudaExperts&>(*p.experts);
  const cuda::ExpertShape shape{.rows = p.tokens, .top_k = p.top_k, .experts = e.count};
  const cuda::ExpertPlan plan{shape, expert_plan_.get(cuda::expert_plan_bytes(shape))};
  const int64_t pairs = p.tokens * p.top_k;
  const int32_t* live = arrays_.query_start + arrays_.sequences;
  float* up = expert_up_.get(pairs * e.up_rows);
  float* y = expert_out_.get(pairs * p.width);
  void* activated = expert_activated_.get(pairs * e.intermediate * dtype_bytes(dtype_));
  cuda::sort_by_expert(plan, p.expert, live, stream_.get());
  cuda::expert_product({.plan = plan,
                        .x = {p.x, p.width, dtype_},
                        .x_per_row = true,
                        .weight = e.up.as<>(),
                        .bias = e.up_bias.data(),
                        .in = p.width,
                        .out = e.up_rows,
                        .y = {up, e.up_rows, DType::kFloat32}},
                       stream_.get());
  mlp_gate(e.gate, up, 1, pairs, e.intermediate, activated);
  cuda::expert_product({.plan = plan,
                        .x = {activated, e.intermediate, dtype_},
                        .weight = e.down.as<>(),
                        .bias = e.down_bias.data(),
                        .in = e.intermediate,
                        .out = p.width,
                        .y = {y, p.width, DType::kFloat32}},
                       stream_.get());
  cuda::combine_experts({.x = {y, p.width, DType::kFloat32},
                         .weight = p.weight,
                         .live_rows = live,
                         .rows = p.tokens,
                         .top_k = p.top_k,
                         .dim = p.width,
                         .y = {p.y, p.width, DType::kFloat32}},
                        stream_.get());
}

void CudaBackend::add_gated(const float* x, const float* gate, int64_t rows, int64_t dim,
                            float* y) {
  cuda::InRows added{x, dim, DType::kFloat32};
  if (gate) {
    float* gated = gated_.get(rows * dim);
    cuda::combine_experts({.shared = added,
                           .shared_gate = {gate, 1, DType::kFloat32},
                           .rows = rows,
                           .dim = dim,
                           .y = {gated, dim, DType::kFloat32}},
                          stream_.get());
    added.data = gated;
  }
  cuda::add_scaled(added, 1, rows, dim, {y, dim, DType::kFloat32}, stream_.get());
}

}  // namespace replayssm
