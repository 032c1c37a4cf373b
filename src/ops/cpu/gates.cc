// Gates of the recurrence with a scalar decay. A few values per head and token:
// plain loops in the precision that libm gives.

#include <algorithm>
#include <cmath>

#include "ops/cpu/recurrent.h"

namespace replayssm::cpu {
namespace {

// log(1 + e^x); x itself from where the two are equal in fp32.
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

void mamba2_gates(const Mamba2GateParams& p, ThreadPool& pool) {
  pool.for_ranges(p.tokens, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < p.heads; ++h) {
        const float dt = softplus(p.dt[t * p.dt_stride + h] + p.dt_bias[h]);
        const float b = std::clamp(dt, p.dt_min, p.dt_max);
        p.b[t * p.heads + h] = b;
        p.g[t * p.heads + h] = b * p.a[h];
      }
    }
  });
}

void delta_gates(const DeltaGateParams& p, ThreadPool& pool) {
  pool.for_ranges(p.tokens, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < p.heads; ++h) {
        p.b[t * p.heads + h] = 1.0f / (1.0f + std::exp(-p.beta[t * p.stride + h]));
        p.g[t * p.heads + h] = p.a[h] * softplus(p.alpha[t * p.stride + h] + p.dt_bias[h]);
      }
    }
  });
}

}  // namespace replayssm::cpu
