// A weight tensor in host memory: a view into a mapped checkpoint file, or owned where loading had
// to rearrange it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "core/memory.h"
#include "replayssm/types.h"

namespace replayssm {

struct Tensor {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;  // row-major; null = absent
  std::shared_ptr<const void>
      storage;  // keeps `data` alive; dropping the last one releases the pages

  explicit operator bool() const { return data != nullptr; }
  int64_t elements() const {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  }
  int64_t bytes() const { return elements() * dtype_bytes(dtype); }

  // All elements as fp32.
  std::vector<float> to_floats() const;
};

// Writes all elements as `dtype` to `to`, which lies in `memory`.
void write_tensor(const Tensor& tensor, DType dtype, std::byte* to, Memory& memory);

}  // namespace replayssm
