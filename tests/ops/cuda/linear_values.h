// What tests of matrix products share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "core/half.h"
#include "core/philox.h"
#include "ops/cuda/linear.h"

namespace replayssm::testing {

// Values of the type, as their doubles and as memory.
struct Values {
  std::vector<double> exact;
  std::vector<std::byte> bytes;

  Values(DType dtype, int64_t count, uint64_t seed) {
    for (int64_t i = 0; i < count; ++i) {
      const auto x = static_cast<float>(2 * uniform(seed, i) - 1);
      switch (dtype) {
        case DType::kBFloat16: add(from_float<bf16>(x)); break;
        case DType::kFloat16: add(from_float<fp16>(x)); break;
        default: add(x);
      }
    }
  }
  template <class T>
  void add(T value) {
    exact.push_back(to_float(value));
    const auto* at = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), at, at + sizeof value);
  }
};

// The sum of `in` products in fp32, in any order.
inline double tolerance(int64_t in) { return 4e-7 * static_cast<double>(in); }

// y of a row whose product is `sums`; half of them are gates.
inline double activated(cuda::LinearActivation activation, float scale,
                        const std::vector<double>& sums, int64_t n) {
  if (activation == cuda::LinearActivation::kReluSquared) {
    const double x = std::max(sums[n], 0.0) * scale;
    return x * x;
  }
  const double gate = sums[n] * scale;
  return gate / (1 + std::exp(-gate)) * sums[sums.size() / 2 + n];
}

}  // namespace replayssm::testing
