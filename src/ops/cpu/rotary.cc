// Rotary position embedding. The sines of a token are computed once and shared by its heads.
#include <cmath>

#include "core/check.h"
#include "ops/cpu/dense.h"
#include "ops/cpu/parallel_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/rotary.cc"
#include "hwy/foreach_target.h"
// clang-format off: behind foreach_target.h
#include "ops/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

using namespace replayssm::HWY_NAMESPACE;

void RotateHead(float* x, const float* cosine, const float* sine, int64_t half) {
  const hn::ScalableTag<float> d;
  ForVectors(d, static_cast<size_t>(half), [&](size_t i, auto n) HWY_ATTR {
    const auto c = LoadF32N(d, cosine + i, n), s = LoadF32N(d, sine + i, n);
    const auto a = LoadF32N(d, x + i, n), b = LoadF32N(d, x + half + i, n);
    StoreF32N(hn::Sub(hn::Mul(a, c), hn::Mul(b, s)), d, x + i, n);
    StoreF32N(hn::Add(hn::Mul(b, c), hn::Mul(a, s)), d, x + half + i, n);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace replayssm::cpu {
namespace {

HWY_EXPORT(RotateHead);

constexpr int64_t kMaxRotaryDim = 1024;

}  // namespace

void rotary(float* x, int64_t row_stride, const int64_t* position, const float* inverse_frequency,
            int64_t rows, int64_t heads, int64_t dim, int64_t rotary_dim, ThreadPool& pool) {
  REPLAYSSM_CHECK(rotary_dim % 2 == 0 && rotary_dim <= dim && rotary_dim <= kMaxRotaryDim,
                  "rotary_dim=", rotary_dim, " dim=", dim);
  REPLAYSSM_CHECK(rows <= 1 || row_stride >= heads * dim, "row_stride=", row_stride,
                  " heads=", heads, " dim=", dim);
  const int64_t half = rotary_dim / 2;
  parallel_rows(pool, rows, heads * dim, [&](int64_t begin, int64_t end) {
    float cosine[kMaxRotaryDim / 2], sine[kMaxRotaryDim / 2];
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(position[r]) * inverse_frequency[i];
        cosine[i] = std::cos(angle);
        sine[i] = std::sin(angle);
      }
      for (int64_t h = 0; h < heads; ++h)
        HWY_DYNAMIC_DISPATCH(RotateHead)(x + r * row_stride + h * dim, cosine, sine, half);
    }
  });
}

}  // namespace replayssm::cpu

#endif  // HWY_ONCE
