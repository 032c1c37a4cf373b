// SIMD helpers of the CPU ops, compiled once per instruction set (included after foreach_target.h).
//
// Values are fp32 vectors; memory is float, bf16 or fp16. Stores round to nearest even, NaN stays
// NaN: Highway 1.0.3 truncates to bf16, and to fp16 where the machine has no conversion, so both
// are written out.
#if defined(REPLAYSSM_OPS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_SIMD_INL_H_
#undef REPLAYSSM_OPS_CPU_SIMD_INL_H_
#else
#define REPLAYSSM_OPS_CPU_SIMD_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/half.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Whether this target masks loads and stores of any lane size without touching the rest, and
// whether it converts fp16 in hardware.
#if HWY_ARCH_X86
inline constexpr bool kMasksMemory = HWY_TARGET <= HWY_AVX3;
inline constexpr bool kConvertsFp16 = HWY_TARGET <= HWY_AVX2;
#else
inline constexpr bool kMasksMemory = false;
inline constexpr bool kConvertsFp16 = false;
#endif

template <class D>
using Bits16 = hn::Rebind<uint16_t, D>;
template <class D>
using Bits32 = hn::RebindToUnsigned<D>;

// The fp32 values of 16-bit patterns; `T()` selects the format.
template <class D>
HWY_INLINE hn::Vec<D> Widen(D d, hn::Vec<Bits16<D>> bits, bf16) {
  const Bits32<D> du;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
}

template <class D>
HWY_INLINE hn::Vec<D> Widen(D d, hn::Vec<Bits16<D>> bits, fp16) {
  if constexpr (kConvertsFp16) {
    return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), bits));
  } else {
    const Bits32<D> du;
    const auto wide = hn::PromoteTo(du, bits);
    const auto sign = hn::ShiftLeft<16>(hn::And(wide, hn::Set(du, 0x8000u)));
    const auto magnitude = hn::ShiftLeft<13>(hn::And(wide, hn::Set(du, 0x7fffu)));
    // Exact, subnormals included: only the exponent's bias differs.
    const auto scaled = hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p112f));
    const auto special = hn::BitCast(d, hn::Or(magnitude, hn::Set(du, 0x7f800000u)));
    const auto is_special = hn::RebindMask(d, hn::Gt(magnitude, hn::Set(du, 0x0f7fffffu)));
    return hn::Or(hn::IfThenElse(is_special, special, scaled), hn::BitCast(d, sign));
  }
}

template <class D>
HWY_INLINE hn::Vec<Bits16<D>> Low16(D, hn::Vec<Bits32<D>> bits) {
  return hn::DemoteTo(Bits16<D>(), hn::BitCast(hn::RebindToSigned<D>(), bits));
}

// 16-bit patterns of fp32 values.
template <class D>
HWY_INLINE hn::Vec<Bits16<D>> Narrow(D d, hn::Vec<D> v, bf16) {
  const Bits32<D> du;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu)));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x400000u));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
  return Low16(d, hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded)));
}

template <class D>
HWY_INLINE hn::Vec<Bits16<D>> Narrow(D d, hn::Vec<D> v, fp16) {
  if constexpr (kConvertsFp16) {
    return hn::BitCast(Bits16<D>(), hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v));
  } else {
    const Bits32<D> du;
    const auto bits = hn::BitCast(du, v);
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000u));
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
    const auto rounded =
        hn::Sub(hn::Add(magnitude, hn::Add(odd, hn::Set(du, 0xfffu))), hn::Set(du, 112u << 23));
    const auto normal = hn::ShiftRight<13>(rounded);
    // Below 2^-14 the rounding of this sum makes the subnormal.
    const auto shifted = hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f));
    const auto subnormal = hn::Sub(hn::BitCast(du, shifted), hn::Set(du, 0x3f000000u));
    auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x38800000u)), subnormal, normal);
    const auto overflows = hn::Gt(magnitude, hn::Set(du, 0x477fefffu));  // >= 65520
    result = hn::IfThenElse(overflows, hn::Set(du, 0x7c00u), result);
    const auto is_nan = hn::Gt(magnitude, hn::Set(du, 0x7f800000u));
    result = hn::IfThenElse(is_nan, hn::Set(du, 0x7e00u), result);
    return Low16(d, hn::Or(result, sign));
  }
}

// A vector of values at p, any alignment.
template <class D>
HWY_INLINE hn::Vec<D> LoadF32(D d, const float* p) {
  return hn::LoadU(d, p);
}
template <class D, class T>
HWY_INLINE hn::Vec<D> LoadF32(D d, const T* p) {
  return Widen(d, hn::LoadU(Bits16<D>(), &p->bits), T());
}

template <class D>
HWY_INLINE void StoreF32(hn::Vec<D> v, D d, float* p) {
  hn::StoreU(v, d, p);
}
template <class D, class T>
HWY_INLINE void StoreF32(hn::Vec<D> v, D d, T* p) {
  hn::StoreU(Narrow(d, v, T()), Bits16<D>(), &p->bits);
}

// The first n <= Lanes(d) elements at p, zero above; memory behind them is not touched.
template <class D, class L>
HWY_INLINE hn::Vec<D> LoadFirst(D d, const L* p, size_t n) {
  if constexpr (kMasksMemory) {
    return hn::MaskedLoad(hn::FirstN(d, n), d, p);
  } else {
    HWY_ALIGN L lanes[hn::MaxLanes(d)] = {};
    std::memcpy(lanes, p, n * sizeof(L));
    return hn::Load(d, lanes);
  }
}
template <class D, class L>
HWY_INLINE void StoreFirst(hn::Vec<D> v, D d, L* p, size_t n) {
  if constexpr (kMasksMemory) {
    hn::BlendedStore(v, hn::FirstN(d, n), d, p);
  } else {
    HWY_ALIGN L lanes[hn::MaxLanes(d)];
    hn::Store(v, d, lanes);
    std::memcpy(p, lanes, n * sizeof(L));
  }
}

// LoadF32 and StoreF32 of the first n <= Lanes(d) values only: the others are zero, or not written.
template <class D>
HWY_INLINE hn::Vec<D> LoadF32N(D d, const float* p, size_t n) {
  return LoadFirst(d, p, n);
}
template <class D, class T>
HWY_INLINE hn::Vec<D> LoadF32N(D d, const T* p, size_t n) {
  return Widen(d, LoadFirst(Bits16<D>(), &p->bits, n), T());
}

template <class D>
HWY_INLINE void StoreF32N(hn::Vec<D> v, D d, float* p, size_t n) {
  StoreFirst(v, d, p, n);
}
template <class D, class T>
HWY_INLINE void StoreF32N(hn::Vec<D> v, D d, T* p, size_t n) {
  StoreFirst(Narrow(d, v, T()), Bits16<D>(), &p->bits, n);
}

// The n of a whole vector.
struct WholeVector {};

template <class D, class T>
HWY_INLINE hn::Vec<D> LoadF32N(D d, const T* p, WholeVector) {
  return LoadF32(d, p);
}
template <class D, class T>
HWY_INLINE void StoreF32N(hn::Vec<D> v, D d, T* p, WholeVector) {
  StoreF32(v, d, p);
}

// Calls fn(i, n) for the vectors of `count` values, i = 0, Lanes(d), ...; n is what LoadF32N and
// StoreF32N take: a whole vector, or the rest at the end.
template <class D, class Fn>
HWY_INLINE void ForVectors(D d, size_t count, Fn&& fn) {
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) fn(i, WholeVector());
  if (i < count) fn(i, count - i);
}

// `v` after a round trip through T.
template <class D>
HWY_INLINE hn::Vec<D> RoundF32(D, hn::Vec<D> v, float) {
  return v;
}
template <class D, class T>
HWY_INLINE hn::Vec<D> RoundF32(D d, hn::Vec<D> v, T format) {
  return Widen(d, Narrow(d, v, format), format);
}

// e^v within 2 ulp for all v: 0 below -104, inf above 88.73, NaN for NaN.
template <class D>
HWY_INLINE hn::Vec<D> ExpF32(D d, hn::Vec<D> v) {
  const auto clamped = hn::Min(hn::Max(v, hn::Set(d, -105.0f)), hn::Set(d, 104.0f));
  return hn::IfThenElse(hn::IsNaN(v), v, hn::Exp(d, clamped));
}

template <class D>
HWY_INLINE hn::Vec<D> SigmoidF32(D d, hn::Vec<D> v) {
  const auto one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, ExpF32(d, hn::Neg(v))));
}

template <class D>
HWY_INLINE hn::Vec<D> SiluF32(D d, hn::Vec<D> v) {
  return hn::Div(v, hn::Add(hn::Set(d, 1.0f), ExpF32(d, hn::Neg(v))));
}

// The sum of the lanes, in an order that depends on the number of lanes alone.
template <class D>
HWY_INLINE float SumF32(D d, hn::Vec<D> v) {
  return hn::GetLane(hn::SumOfLanes(d, v));
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
