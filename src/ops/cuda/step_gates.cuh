// Kimi Delta's decays.
#pragma once

#include "ops/cuda/elements.cuh"
#include "replayssm/ops.h"

namespace replayssm::cuda {

// Four columns of one head.
class ChannelDecays {
 public:
  __device__ ChannelDecays(const ChannelGate& gate, int head, int state, int column)
      : scale_(gate.scale[head]), lower_bound_(gate.lower_bound) {
    load_elements<float, 4>(gate.bias + static_cast<int64_t>(head) * state + column, bias_);
  }
  // Raw gates become decays.
  __device__ void apply(float (&raw)[4]) const {
    if (lower_bound_ < 0) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        raw[e] = expf(lower_bound_ / (1.0f + expf(scale_ * (raw[e] + bias_[e]))));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) raw[e] = __expf(scale_ * softplus(raw[e] + bias_[e]));
    }
  }

 private:
  float scale_, lower_bound_, bias_[4];
};

}  // namespace replayssm::cuda
