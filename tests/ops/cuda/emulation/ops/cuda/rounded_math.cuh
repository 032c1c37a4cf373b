// Division and roots of the host, which rounds them correctly.
#pragma once

#include <cmath>

namespace replayssm::cuda {

inline float rounded_inverse(float d) { return 1.0f / d; }
inline float rounded_quotient(float x, float d) { return x / d; }
inline float rounded_root(float x) { return std::sqrt(x); }

}  // namespace replayssm::cuda
