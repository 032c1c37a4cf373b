// The causal depthwise convolution in front of a recurrent layer, one channel, in double.
#pragma once

#include <cstdint>
#include <span>

namespace replayssm::reference {

// The output of token i of a window:
//
//   silu(bias + sum_j weight[j] x_j)
//
// x of the last tap is the token's own input, the taps before it are its nearest ancestors within
// the window, then the committed inputs, newest first, then zeros.
double causal_conv(std::span<const double> weight, double bias, std::span<const double> committed,
                   std::span<const double> window, std::span<const int32_t> parent, int64_t i);

}  // namespace replayssm::reference
