// Weights that are made up: speed can be measured where no checkpoint is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/tensor.h"

namespace replayssm {

// Matrices are random and made where they are needed (Tensor::random). Vectors hold what their name
// stands for: norms 1, biases 0, decays and steps of common sizes. The same name, the same numbers.
Tensor dummy_tensor(const std::string& name, const std::vector<int64_t>& shape);

}  // namespace replayssm
