// Mixtures of experts on CUDA devices, without the host knowing who was chosen. The rules of
// dense.h hold.
//
//   route_experts -> sort_by_expert -> expert_product (up) -> swiglu or relu_squared over the pairs
//   -> expert_product (down) -> combine_experts
//
// Pair p = row * top_k + choice is a row together with one of its experts.
#pragma once

#include "ops/cuda/dense.h"
#include "ops/layer_params.h"

namespace replayssm::cuda {

inline constexpr int64_t kMaxExperts = 1024, kMaxTopK = 32;

// Chooses the experts of every row and their weights. Ties go to the lower index.
void route_experts(const RouterParams& params, cudaStream_t stream);

struct ExpertShape {
  int64_t rows = 0;  // at most
  int64_t top_k = 0;
  int64_t experts = 0;
};
// Pairs sorted by expert, in tiles of one expert's.
struct ExpertPlan {
  ExpertShape shape;
  void* memory = nullptr;  // expert_plan_bytes, aligned to 16
};
int64_t expert_plan_bytes(const ExpertShape& shape);

// expert: [rows, top_k]. live_rows: device pointer to how many rows exist, e.g. &query_start[
// sequences]; null: all. The pairs of others are left out.
void sort_by_expert(const ExpertPlan& plan, const int32_t* expert, const int32_t* live_rows,
                    cudaStream_t stream);

// y[p] = W[expert of p] x[p] (+ bias), for every live pair; others are left as they are.
struct ExpertProductParams {
  ExpertPlan plan;
  InRows x{};                    // [rows, in] if x_per_row, else [rows * top_k, in]
  bool x_per_row = false;        //
  const void* weight = nullptr;  // [experts, out, in] in x's type
  const float* bias = nullptr;   // [experts, out], may be null
  int64_t in = 0;
  int64_t out = 0;
  OutRows y{};  // [rows * top_k, out]
};
void expert_product(const ExpertProductParams& params, cudaStream_t stream);

// y[r] = sum over its choices of weight x[pair], in their order, + sigmoid(gate[r]) shared[r].
struct CombineParams {
  InRows x{};                          // [rows * top_k, dim]; data may be null: no sum
  const float* weight = nullptr;       // [rows, top_k]
  InRows shared{};                     // [rows, dim]; data may be null
  InRows shared_gate{};                // [rows, 1]; data may be null: a factor of 1
  const int32_t* live_rows = nullptr;  // as in sort_by_expert; y of other rows is 0
  int64_t rows = 0;
  int64_t top_k = 0;
  int64_t dim = 0;
  OutRows y{};  // [rows, dim]
};
void combine_experts(const CombineParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
