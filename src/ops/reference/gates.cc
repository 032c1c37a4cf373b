#include "ops/reference/gates.h"

#include <algorithm>
#include <cmath>

#include "ops/reference/dense.h"

namespace replayssm::reference {

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

Gate mamba2_gate(double dt, double dt_bias, double a, double dt_min, double dt_max) {
  const double b = std::clamp(softplus(dt + dt_bias), dt_min, dt_max);
  return {.b = b, .g = b * a};
}

Gate delta_gate(double beta, double alpha, double dt_bias, double a) {
  return {.b = sigmoid(beta), .g = a * softplus(alpha + dt_bias)};
}

double channel_log_decay(double raw, double scale, double bias, double lower_bound) {
  if (lower_bound < 0) return lower_bound * sigmoid(-scale * (raw + bias));
  return scale * softplus(raw + bias);
}

}  // namespace replayssm::reference
