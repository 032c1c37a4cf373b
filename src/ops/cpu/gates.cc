// Gates of the recurrence with a scalar decay. A few values per head and token:
// plain loops in the precision that libm gives.

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "core/check.h"
#include "ops/check_params.h"
#include "ops/cpu/recurrent.h"

namespace replayssm::cpu {
namespace {

// log(1 + e^x); x itself from where the two are equal in fp32.
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

void check_tokens(int64_t tokens, int64_t heads) {
  if (tokens < 0) fail("tokens: expected at least 0, got ", tokens);
  if (heads < 1) fail("heads: expected at least 1, got ", heads);
}

void check_floats(std::initializer_list<std::pair<const char*, const float*>> pointers) {
  for (const auto& [name, pointer] : pointers) check_pointer(name, pointer, sizeof(float));
}

void check_stride(const char* name, int64_t heads, int64_t stride) {
  if (stride < heads) fail(name, ": expected at least ", heads, ", got ", stride);
}

}  // namespace

void mamba2_gates(const Mamba2GateParams& p, ThreadPool& pool) {
  check_tokens(p.tokens, p.heads);
  if (p.tokens == 0) return;
  check_floats({{"dt", p.dt}, {"dt_bias", p.dt_bias}, {"a", p.a}, {"b", p.b}, {"g", p.g}});
  check_stride("dt_stride", p.heads, p.dt_stride);
  if (!(p.dt_min <= p.dt_max)) {
    fail("dt_max: expected at least dt_min = ", p.dt_min, ", got ", p.dt_max);
  }
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
  check_tokens(p.tokens, p.heads);
  if (p.tokens == 0) return;
  check_floats({{"beta", p.beta}, {"b", p.b}});
  if (p.alpha != nullptr) check_floats({{"dt_bias", p.dt_bias}, {"a", p.a}, {"g", p.g}});
  check_stride("stride", p.heads, p.stride);
  pool.for_ranges(p.tokens, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < p.heads; ++h) {
        p.b[t * p.heads + h] = 1.0f / (1.0f + std::exp(-p.beta[t * p.stride + h]));
        if (p.alpha == nullptr) continue;
        p.g[t * p.heads + h] = p.a[h] * softplus(p.alpha[t * p.stride + h] + p.dt_bias[h]);
      }
    }
  });
}

}  // namespace replayssm::cpu
