// Random weights of any shape: speed can be measured where no checkpoint is.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/buffer.h"
#include "model/tensor.h"

namespace replayssm {

// Matrices are views of one block of random numbers, so that a model of any size takes no more
// memory than its largest one. Vectors hold what their name stands for: norms 1, biases 0, decays
// and steps of common sizes.
class DummyWeights {
 public:
  Tensor make(const std::string& name, const std::vector<int64_t>& shape);

 private:
  std::shared_ptr<const Buffer> block_;  // bfloat16
};

}  // namespace replayssm
