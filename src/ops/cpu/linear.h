// Matrix products with a model's weights on the CPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/thread_pool.h"
#include "replayssm/types.h"

namespace replayssm::cpu {

// Some rows of a weight matrix as a checkpoint holds it: [rows, in_features], row-major.
struct WeightRows {
  const void* data = nullptr;
  DType dtype = DType::kBFloat16;
  int64_t rows = 0;
};

// y[m, n] = sum_k x[m, k] weight[n, k] + bias[n], accumulated in fp32.
//
// The weight is converted to `dtype` (float32 or bfloat16) and packed once for the machine's matrix
// units, one slice of rows per thread of the pool; the source may go away after construction.
class Linear {
 public:
  Linear();
  // `blocks` are stacked in order: several projections of the same input become one product. `bias`
  // is [out_features] or null.
  Linear(const std::vector<WeightRows>& blocks, int64_t in_features, DType dtype, ThreadPool& pool,
         const float* bias = nullptr);
  ~Linear();
  Linear(Linear&&) noexcept;
  Linear& operator=(Linear&&) noexcept;

  int64_t in_features() const;
  int64_t out_features() const;
  int64_t weight_bytes() const;  // as held

  // x: [rows, in_features] in the weight's dtype, rows x_stride apart; y: [rows, out_features]
  // fp32, rows y_stride apart. Must be called with the pool of the construction.
  void apply(const void* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride,
             ThreadPool& pool) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace replayssm::cpu
