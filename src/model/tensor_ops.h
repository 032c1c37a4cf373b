// Rearranging weights at load time. Results own their memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/tensor.h"

namespace replayssm {

// "[3, 4]"
std::string shape_text(std::span<const int64_t> shape);

Tensor copied(const Tensor& tensor);

struct RowRange {
  int64_t first, count;
};

// The given rows of a matrix or vector, one range after another.
Tensor gather_rows(const Tensor& matrix, std::span<const RowRange> rows);

// The given columns of a matrix.
Tensor gather_columns(const Tensor& matrix, const RowRange& columns);

// 1 + w in fp32.
Tensor one_plus(const Tensor& tensor);

}  // namespace replayssm
