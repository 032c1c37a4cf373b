#include "ops/reference/conv.h"

#include "ops/reference/dense.h"

namespace replayssm::reference {

double causal_conv(std::span<const double> weight, double bias, std::span<const double> committed,
                   std::span<const double> window, std::span<const int32_t> parent, int64_t i) {
  double sum = bias;
  auto before = static_cast<int64_t>(committed.size());
  for (size_t tap = weight.size(); tap-- > 0;) {
    if (i >= 0) {
      sum += weight[tap] * window[i];
      i = parent[i];
    } else if (before > 0) {
      sum += weight[tap] * committed[--before];
    }
  }
  return silu(sum);
}

}  // namespace replayssm::reference
