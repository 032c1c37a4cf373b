// The SIMD helpers against core/half.h and the C library, on every instruction set of the machine.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/simd_test.cc"
#include "hwy/foreach_target.h"
// clang-format off: after foreach_target.h
#include "ops/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {
namespace {

// Widens and narrows arrays; full vectors, then the tail.
template <class T>
void widen(const T* x, size_t count, float* y) {
  const hn::ScalableTag<float> d;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) StoreF32(LoadF32(d, x + i), d, y + i);
  StoreF32N(LoadF32N(d, x + i, count - i), d, y + i, count - i);
}

template <class T>
void narrow(const float* x, size_t count, T* y) {
  const hn::ScalableTag<float> d;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) StoreF32(LoadF32(d, x + i), d, y + i);
  StoreF32N(LoadF32N(d, x + i, count - i), d, y + i, count - i);
}

void widen_bf16(const bf16* x, size_t count, float* y) { widen(x, count, y); }
void widen_fp16(const fp16* x, size_t count, float* y) { widen(x, count, y); }
void narrow_bf16(const float* x, size_t count, bf16* y) { narrow(x, count, y); }
void narrow_fp16(const float* x, size_t count, fp16* y) { narrow(x, count, y); }

// function: 0 exp, 1 sigmoid, 2 silu.
void apply(int function, const float* x, size_t count, float* y) {
  const hn::ScalableTag<float> d;
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    const size_t n = HWY_MIN(hn::Lanes(d), count - i);
    const auto v = LoadF32N(d, x + i, n);
    StoreF32N(function == 0 ? ExpF32(d, v) : (function == 1 ? SigmoidF32(d, v) : SiluF32(d, v)), d,
              y + i, n);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>

namespace replayssm {
namespace {

HWY_EXPORT(widen_bf16);
HWY_EXPORT(widen_fp16);
HWY_EXPORT(narrow_bf16);
HWY_EXPORT(narrow_fp16);
HWY_EXPORT(apply);

// Runs the test body on one instruction set after the other.
class Simd : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

INSTANTIATE_TEST_SUITE_P(Targets, Simd, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

bool same(float a, float b) {
  return std::isnan(a) ? std::isnan(b) : std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

template <class T, class Fn>
void check_widening(Fn widen) {
  std::vector<T> x(65536);
  for (size_t i = 0; i < x.size(); ++i) x[i].bits = static_cast<uint16_t>(i);
  std::vector<float> y(x.size());
  widen(x.data(), x.size(), y.data());
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_TRUE(same(y[i], to_float(x[i]))) << i << ": " << y[i] << " " << to_float(x[i]);
}

// All floats near every 16-bit value and near the middle between neighbours.
template <class T, class Fn>
void check_narrowing(Fn narrow) {
  std::vector<float> x;
  for (uint32_t high = 0; high < 65536; ++high)
    for (uint32_t low :
         {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      x.push_back(std::bit_cast<float>((high << 16) | low));
  std::vector<T> y(x.size());
  narrow(x.data(), x.size(), y.data());
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_TRUE(same(to_float(y[i]), rounded<T>(x[i]))) << x[i] << ": " << to_float(y[i]);
}

TEST_P(Simd, Widens) {
  check_widening<bf16>([](auto... a) { HWY_DYNAMIC_DISPATCH(widen_bf16)(a...); });
  check_widening<fp16>([](auto... a) { HWY_DYNAMIC_DISPATCH(widen_fp16)(a...); });
}

TEST_P(Simd, NarrowsToNearestEven) {
  check_narrowing<bf16>([](auto... a) { HWY_DYNAMIC_DISPATCH(narrow_bf16)(a...); });
  check_narrowing<fp16>([](auto... a) { HWY_DYNAMIC_DISPATCH(narrow_fp16)(a...); });
}

TEST_P(Simd, TailsTouchNothingElse) {
  for (size_t n = 1; n < 40; ++n) {
    // Exactly n elements on the heap: AddressSanitizer sees a read behind them.
    const std::vector<float> x(n, 1.5f);
    std::vector<bf16> y(n + 4, bf16{0x1234});
    HWY_DYNAMIC_DISPATCH(narrow_bf16)(x.data(), n, y.data());
    std::vector<fp16> half(n, fp16{0x3c00});
    std::vector<float> z(n + 4, -7);
    HWY_DYNAMIC_DISPATCH(widen_fp16)(half.data(), n, z.data());
    for (size_t i = 0; i < n + 4; ++i) {
      EXPECT_EQ(y[i].bits, i < n ? 0x3fc0 : 0x1234) << n;
      EXPECT_EQ(z[i], i < n ? 1 : -7) << n;
    }
  }
}

TEST_P(Simd, ExponentialsAreAccurate) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kMin = std::numeric_limits<float>::min();
  constexpr float kUlp = std::numeric_limits<float>::epsilon();
  std::vector<float> x = {0.0f, -0.0f, -kInf, -1e30f, -104.5f, 88.7f, NAN};
  for (float v = -87; v < 88; v += 0.0137f) x.push_back(v);
  std::vector<float> y(x.size());
  using Function = double (*)(double);
  const Function expected[] = {[](double v) { return std::exp(v); },
                               [](double v) { return 1 / (1 + std::exp(-v)); },
                               [](double v) { return v / (1 + std::exp(-v)); }};
  for (int function = 0; function < 3; ++function) {
    HWY_DYNAMIC_DISPATCH(apply)(function, x.data(), x.size(), y.data());
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::isnan(x[i]) || (function == 2 && std::isinf(x[i]))) {
        EXPECT_TRUE(std::isnan(y[i]));
        continue;
      }
      // The exponential within 2 ulp, then one rounding each for the sum and the quotient.
      const double e = expected[function](x[i]);
      EXPECT_NEAR(y[i], e, std::abs(e) * 4 * kUlp + kMin) << function << " " << x[i];
    }
  }
}

TEST_P(Simd, ExponentialsAtTheEnds) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float x[] = {-kInf, kInf, -1e30f, 1e30f, 104, -105};
  float y[6];
  HWY_DYNAMIC_DISPATCH(apply)(0, x, 6, y);
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[1], kInf);
  EXPECT_EQ(y[2], 0);
  EXPECT_EQ(y[3], kInf);
  EXPECT_EQ(y[4], kInf);
  EXPECT_EQ(y[5], 0);
  HWY_DYNAMIC_DISPATCH(apply)(1, x, 6, y);
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[1], 1);
  EXPECT_EQ(y[2], 0);
  EXPECT_EQ(y[3], 1);
}

}  // namespace
}  // namespace replayssm

#endif  // HWY_ONCE
