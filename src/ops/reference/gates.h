// What a layer's projections make of a token's write strength and log decay, in double.
#pragma once

namespace replayssm::reference {

// log(1 + e^x)
double softplus(double x);

struct Gate {
  double b = 0;  // write strength
  double g = 0;  // log decay
};

// b = clamp(softplus(dt + dt_bias), dt_min, dt_max), g = b a.
Gate mamba2_gate(double dt, double dt_bias, double a, double dt_min, double dt_max);

// b = sigmoid(beta), g = a softplus(alpha + dt_bias).
Gate delta_gate(double beta, double alpha, double dt_bias, double a);

// Kimi Delta's log decay of a column: scale softplus(raw + bias), or, where lower_bound < 0,
// lower_bound sigmoid(-scale (raw + bias)).
double channel_log_decay(double raw, double scale, double bias, double lower_bound);

}  // namespace replayssm::reference
