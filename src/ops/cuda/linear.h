// Matrix products with a model's weights on CUDA devices, through cuBLASLt.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "core/buffer.h"
#include "replayssm/types.h"

namespace replayssm::cuda {

// What becomes of a product's results y, scaled by `scale` where they are gates.
enum class LinearActivation : uint8_t {
  kNone,
  kSwiGlu,       // silu(scale y[i]) y[half + i], with y's first half the gates
  kReluSquared,  // relu(scale y[i])^2
};

// The norm in front of a product of one row: x is yet to be divided by sqrt(mean(h^2) + eps), where
// h, of `dim` elements, comes as the sums of squares of its parts.
struct RowNorm {
  const float* squares = nullptr;  // [parts]; null: x is what it is
  int64_t parts = 0;
  int64_t dim = 0;
  float eps = 0;
};

// The residual stream behind a product of one row, in place of y:
//
//   hidden += scale y        normed = hidden weight, of which RowNorm is yet to come
struct ResidualSum {
  float* hidden = nullptr;  // [out_features]; null: none
  float scale = 1;
  const float* weight = nullptr;  // [out_features]
  void* normed = nullptr;         // [out_features] in x's type
  float* squares = nullptr;       // [residual_parts(out_features)]
};

// For each of `heads` heads: y[m, n] = sum_k x[m, k] weight[n, k] + bias[n], accumulated in fp32.
struct LinearParams {
  const void* x = nullptr;  // [rows, heads, x_head_stride], of which in_features are read
  int64_t x_head_stride = 0;
  const void* weight = nullptr;  // [heads, out_features, in_features] in x's type
  const float* bias = nullptr;   // [out_features], may be null; one head only
  int64_t in_features = 0;
  int64_t out_features = 0;
  int64_t heads = 1;
  int64_t rows = 0;
  DType dtype = DType::kBFloat16;  // of x and weight: float32, float16 or bfloat16
  float* y = nullptr;  // [rows, heads, y_head_stride], of which out_features are written
  int64_t y_head_stride = 0;
  // One head only, no activation: y may come as so many matrices one behind another, to be added.
  int64_t most_parts = 1;
  // One head only: its outputs, side by side, in x's type. y may then be left alone.
  LinearActivation activation = LinearActivation::kNone;
  float scale = 1;
  void* activated = nullptr;
  // Only where fuses_norms(params).
  RowNorm norm{};
  ResidualSum residual{};
};

// Whether a product is one of those that take norms in front and behind: one row of bfloat16.
bool fuses_norms(const LinearParams& params);
int64_t residual_parts(int64_t out_features);

// What a product has left behind.
struct LinearResult {
  bool activated = true;  // else y holds the product, without the activation
  int64_t parts = 1;      // of y
};

// How products are run: the library's handle, its scratch memory and the way chosen for every shape
// seen so far. One stream at a time.
class LinearRunner {
 public:
  explicit LinearRunner(Memory& memory);
  ~LinearRunner();

  // Enqueued only. A shape's first call asks the library for an algorithm.
  LinearResult run(const LinearParams& params, cudaStream_t stream);

  // While tuning is on, a shape's first call outside of captures waits for the device: it times the
  // algorithms that the library proposes and the kernels for few rows (skinny.h, narrow.h), and
  // keeps the fastest. One row always has the first of those.
  void tune(bool on);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace replayssm::cuda
