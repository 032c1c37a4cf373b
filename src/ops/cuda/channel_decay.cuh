// Kimi Delta's decay of a column, for kernels in which registers live across many of them. The same
// bits as ChannelDecays (step_gates.cuh). The fast exponential's relative error is the exponent's
// rounding: small where the decay is not.
#pragma once

#include "ops/cuda/elements.cuh"
#include "ops/cuda/rounded_math.cuh"

namespace replayssm::cuda {

// Of its raw gate (ChannelGate).
__device__ inline float channel_decay(float raw, float scale, float bias, float lower_bound) {
  const float x = raw + bias;
  if (lower_bound < 0)
    return expf(rounded_quotient(lower_bound, fminf(1.0f + expf(scale * x), 0x1p100f)));
  return __expf(scale * softplus(x));
}

}  // namespace replayssm::cuda
