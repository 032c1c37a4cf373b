// A weight tensor: a view of host memory that is a mapped checkpoint file, or owned where loading
// had to rearrange it; or numbers that are made up where they are needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "core/memory.h"
#include "replayssm/types.h"

namespace replayssm {

// Weights of core/random_weight.h.
struct RandomRange {
  uint64_t first;
  int64_t count;
};

struct Tensor {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;  // row-major
  std::shared_ptr<const void>
      storage;  // keeps `data` alive; dropping the last one releases the pages

  std::vector<RandomRange> random{};  // without data: the elements, one range behind another

  // Absent ones have neither.
  explicit operator bool() const { return data != nullptr || !random.empty(); }
  int64_t elements() const {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  }
  int64_t bytes() const { return elements() * dtype_bytes(dtype); }

  // The same with data.
  Tensor on_host() const;
  // All elements as fp32.
  std::vector<float> to_floats() const;
};

// Writes all elements as `dtype` to `to`, which lies in `memory`.
void write_tensor(const Tensor& tensor, DType dtype, std::byte* to, Memory& memory);

}  // namespace replayssm
