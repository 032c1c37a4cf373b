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

// log(1 + x) for x in [0, 1] with the relative precision of fp32: 2 atanh(z), z = x / (2 + x),
// whose series at z <= 1/3 ends below half an ulp.
HWY_INLINE V Log1pUnit(V x) {
  const D d;
  const auto z = hn::Div(x, hn::Add(x, hn::Set(d, 2.0f)));
  const auto square = hn::Mul(z, z);
  auto sum = hn::Set(d, 1.0f / 15);
  for (const float term : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3})
    sum = hn::MulAdd(sum, square, hn::Set(d, term));
  const auto twice = hn::Add(z, z);
  return hn::MulAdd(hn::Mul(sum, square), twice, twice);
}

// log(1 + e^x), with a relative precision that does not suffer where it is small.
HWY_INLINE V Softplus(V x) {
  const D d;
  return hn::Add(hn::Max(x, hn::Zero(d)), Log1pUnit(ExpF32(d, hn::Neg(hn::Abs(x)))));
}

// a = the decays of one head's columns, in a scratch row of `width` floats.
template <class T>
void channel_decays(const T* raw, int64_t count, int64_t width, const ChannelGate& gate,
                    int64_t head, float* a) {
  const D d;
  const float* bias = gate.bias + head * count;
  const auto scale = hn::Set(d, gate.scale[head]);
  const auto bound = hn::Set(d, gate.lower_bound);
  const auto store = [&](int64_t i, V x) {
    const auto log_decay = gate.lower_bound < 0
                               ? hn::Mul(bound, SigmoidF32(d, hn::Neg(hn::Mul(scale, x))))
                               : hn::Mul(scale, Softplus(x));
    hn::Store(ExpF32(d, log_decay), d, a + i);
  };
  ForVectors(d, static_cast<size_t>(count), [&](size_t i, auto n) {
    store(static_cast<int64_t>(i), hn::Add(LoadF32N(d, raw + i, n), LoadF32N(d, bias + i, n)));
  });
  // Padding meets keys that are zero there; it must be finite.
  const auto lanes = static_cast<int64_t>(kLanes);
  for (int64_t i = (count + lanes - 1) / lanes * lanes; i < width; i += lanes)
    hn::Store(hn::Zero(d), d, a + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
