// One thread's share of a weight matrix, behind `Linear`: consecutive rows, packed by one backend.
#pragma once

#include <cstdint>
#include <memory>

#include "core/buffer.h"
#include "core/thread_pool.h"
#include "ops/cpu/linear.h"

namespace replayssm::cpu {

// Rows [begin, end) of the stacked `blocks`, wanted in `dtype`.
struct SliceSource {
  const std::vector<WeightRows>& blocks;
  int64_t in_features = 0;
  DType dtype = DType::kBFloat16;
  const float* bias = nullptr;  // [all rows] or null
  int64_t begin = 0;
  int64_t end = 0;

  int64_t rows() const { return end - begin; }
  // Converts `count` rows from row `first` of the slice on to `dtype`, contiguous at `out`.
  void copy_rows(int64_t first, int64_t count, void* out) const;
};

// x: [rows, in_features] in the weight's dtype, x_stride apart; y: [rows, rows of the slice].
struct SliceProduct {
  const void* x = nullptr;
  int64_t x_stride = 0;
  int64_t rows = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
};

class MatrixSlice {
 public:
  virtual ~MatrixSlice() = default;
  virtual int64_t bytes() const = 0;
  // Called on `thread` of the pool.
  virtual void apply(const SliceProduct& product, ThreadPool& pool, int thread) const = 0;
};

// Plain loops on row-major weights.
std::unique_ptr<MatrixSlice> make_plain_slice(const SliceSource& source);

// oneDNN; null where it is not built in or does not serve this dtype on this machine.
std::unique_ptr<MatrixSlice> make_onednn_slice(const SliceSource& source, ThreadPool& pool,
                                               int thread);

}  // namespace replayssm::cpu
