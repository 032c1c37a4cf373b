// Kimi Delta's decays from raw gates, compiled once per instruction set (included after
// foreach_target.h).
#if defined(REPLAYSSM_OPS_CPU_CHANNEL_GATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_CHANNEL_GATE_INL_H_
#undef REPLAYSSM_OPS_CPU_CHANNEL_GATE_INL_H_
#else
#define REPLAYSSM_OPS_CPU_CHANNEL_GATE_INL_H_
#endif

#include <algorithm>

#include "ops/cpu/recurrent-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

// The polynomial with these coefficients, the constant one first.
template <size_t kCount>
HWY_INLINE V Polynomial(V x, const float (&coefficients)[kCount]) {
  const D d;
  auto sum = hn::Set(d, coefficients[kCount - 1]);
  for (size_t i = kCount - 1; i-- > 0;) sum = hn::MulAdd(sum, x, hn::Set(d, coefficients[i]));
  return sum;
}

// 2^x for x <= 0 within an ulp; 0 below the normal numbers, NaN for NaN.
HWY_INLINE V Exp2Negative(V x) {
  const D d;
  const hn::RebindToSigned<D> di;
  // (2^f - 1) / f for |f| <= 1/2: minimax, 7.5e-9.
  constexpr float kTerms[] = {0.69314718f,    0.240226507f,   0.0555035696f,
                              0.00961803086f, 0.00133908669f, 0.000154697307f};
  const auto least = hn::Set(d, -126.0f);
  const auto clamped = hn::Max(least, x);  // NaN stays
  const auto whole = hn::Round(clamped);
  const auto part = hn::Sub(clamped, whole);
  const auto power = hn::MulAdd(part, Polynomial(part, kTerms), hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::ConvertTo(di, whole));
  const auto result = hn::BitCast(d, hn::Add(hn::BitCast(di, power), exponent));
  return hn::IfThenZeroElse(hn::Lt(x, least), result);
}

// log2(1 + e^x): within 2e-8 + 1e-7 of itself.
HWY_INLINE V Softplus2(V x) {
  const D d;
  // log2(1 + u) / u for 0 <= u <= 1: minimax, relative 4.7e-9.
  constexpr float kTerms[] = {1.44269502f,   -0.72134614f,   0.480849713f, -0.360012025f,
                              0.283863693f,  -0.220812693f,  0.152977839f, -0.0821746811f,
                              0.0286393093f, -0.00468007335f};
  const auto log2e = hn::Set(d, 1.44269504f);
  const auto u = Exp2Negative(hn::Neg(hn::Mul(log2e, hn::Abs(x))));
  return hn::MulAdd(log2e, hn::Max(hn::Zero(d), x), hn::Mul(u, Polynomial(u, kTerms)));
}

// a = the decays of one head's columns, in a scratch row of `width` floats.
template <class T>
void channel_decays(const T* raw, int64_t count, int64_t width, const ChannelGate& gate,
                    int64_t head, float* a) {
  const D d;
  const float* bias = gate.bias + head * count;
  const auto scale = hn::Set(d, gate.scale[head]);
  const auto bound = hn::Set(d, gate.lower_bound);
  const auto store = [&](auto&& decay) {
    ForVectors(d, static_cast<size_t>(count), [&](size_t i, auto n) {
      hn::Store(decay(hn::Add(LoadF32N(d, raw + i, n), LoadF32N(d, bias + i, n))), d, a + i);
    });
  };
  if (gate.lower_bound < 0) {
    store(
        [&](V x) { return ExpF32(d, hn::Mul(bound, SigmoidF32(d, hn::Neg(hn::Mul(scale, x))))); });
  } else {
    // exp(scale softplus(x)) to base 2, where its logarithms are exact.
    store([&](V x) { return Exp2Negative(hn::Mul(scale, Softplus2(x))); });
  }
  // Padding meets keys that are zero there; it must be finite.
  const auto lanes = static_cast<int64_t>(kLanes);
  for (int64_t i = (count + lanes - 1) / lanes * lanes; i < width; i += lanes)
    hn::Store(hn::Zero(d), d, a + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
