// 8-bit storage beside simd-inl.h, compiled once per instruction set (included after
// foreach_target.h). Stores round to nearest even.
#if defined(REPLAYSSM_OPS_CPU_SIMD8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_SIMD8_INL_H_
#undef REPLAYSSM_OPS_CPU_SIMD8_INL_H_
#else
#define REPLAYSSM_OPS_CPU_SIMD8_INL_H_
#endif

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "core/eight_bit.h"
#include "hwy/highway.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

template <class D>
using Signed8 = hn::Rebind<int8_t, D>;
template <class D>
using Signed32 = hn::RebindToSigned<D>;

// What loads of a storage type leave to be multiplied in: a power of two.
template <class T>
inline constexpr float kLoadFactor = 1;
template <>
inline constexpr float kLoadFactor<e4m3> = 0x1p8f;

// The value divided by its load factor: the fields of e4m3 are those of fp16 but for the bias of
// the exponent, 7 and 15.
template <class D>
HWY_INLINE hn::Vec<D> Widen(D d, hn::Vec<Signed8<D>> code, e4m3) {
  if constexpr (kConvertsFp16) {
    const Bits16<D> du16;
    const auto wide = hn::BitCast(du16, hn::PromoteTo(hn::Rebind<int16_t, D>(), code));
    return Widen(d, hn::And(hn::ShiftLeft<7>(wide), hn::Set(du16, uint16_t{0xbfff})), fp16());
  } else {
    const Bits32<D> du;
    const auto wide = hn::BitCast(du, hn::PromoteTo(Signed32<D>(), code));
    const auto fields = hn::And(hn::ShiftLeft<20>(wide), hn::Set(du, 0x07f00000u));
    const auto normal = hn::BitCast(d, hn::Add(fields, hn::Set(du, 112u << 23)));
    // Without an implied one: the value with it, less that one.
    const auto with_one = hn::BitCast(d, hn::Add(fields, hn::Set(du, 113u << 23)));
    const auto subnormal = hn::Sub(with_one, hn::Set(d, 0x1p-14f));
    const auto is_subnormal = hn::RebindMask(d, hn::Lt(fields, hn::Set(du, 0x00800000u)));
    const auto sign = hn::And(wide, hn::Set(du, 0x80000000u));
    return hn::Or(hn::IfThenElse(is_subnormal, subnormal, normal), hn::BitCast(d, sign));
  }
}

template <class D>
HWY_INLINE hn::Vec<D> Widen(D d, hn::Vec<Signed8<D>> code, int8) {
  return hn::ConvertTo(d, hn::PromoteTo(Signed32<D>(), code));
}

// Codes of values; those beyond the largest become the largest.
template <class D>
HWY_INLINE hn::Vec<Signed8<D>> Narrow(D d, hn::Vec<D> v, e4m3) {
  const Bits32<D> du;
  const auto size = hn::Min(hn::Abs(v), hn::Set(d, dtype_max_8bit(DType::kFloat8E4M3)));
  const auto bits = hn::BitCast(du, size);
  const auto odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7ffffu)));
  const auto normal = hn::Sub(hn::ShiftRight<20>(rounded), hn::Set(du, 120u << 3));
  // Below 2^-6 the rounding of this sum makes the subnormal.
  const auto shifted = hn::BitCast(du, hn::Add(size, hn::Set(d, 0x1p14f)));
  const auto subnormal = hn::Sub(shifted, hn::BitCast(du, hn::Set(d, 0x1p14f)));
  const auto is_subnormal = hn::RebindMask(du, hn::Lt(size, hn::Set(d, 0x1p-6f)));
  const auto code = hn::IfThenElse(is_subnormal, subnormal, normal);
  const auto sign = hn::And(hn::BitCast(du, v), hn::Set(du, 0x80000000u));
  // The code's own byte, sign-extended, so that it survives the saturating conversion.
  const auto placed = hn::BitCast(Signed32<D>(), hn::Or(hn::ShiftLeft<24>(code), sign));
  return hn::DemoteTo(Signed8<D>(), hn::ShiftRight<24>(placed));
}

template <class D>
HWY_INLINE hn::Vec<Signed8<D>> Narrow(D d, hn::Vec<D> v, int8) {
  const auto most = hn::Set(d, dtype_max_8bit(DType::kInt8));
  return hn::DemoteTo(Signed8<D>(), hn::NearestInt(hn::Clamp(v, hn::Neg(most), most)));
}

// The same for values that are within the range, or not numbers.
template <class D>
HWY_INLINE hn::Vec<Signed8<D>> NarrowWithin(D d, hn::Vec<D> v, int8) {
  // The rounding of this sum leaves the code in the lowest byte.
  const Bits32<D> du;
  const auto sum = hn::BitCast(du, hn::Add(v, hn::Set(d, 0x1.8p23f)));
  return hn::BitCast(Signed8<D>(), hn::U8FromU32(hn::And(sum, hn::Set(du, 0xffu))));
}
template <class D>
HWY_INLINE hn::Vec<Signed8<D>> NarrowWithin(D d, hn::Vec<D> v, e4m3 format) {
  return Narrow(d, v, format);
}

template <class T>
concept EightBit = std::same_as<T, e4m3> || std::same_as<T, int8>;

template <EightBit T>
HWY_INLINE auto* Codes(T* p) {
  return reinterpret_cast<int8_t*>(p);
}
template <EightBit T>
HWY_INLINE auto* Codes(const T* p) {
  return reinterpret_cast<const int8_t*>(p);
}

template <class D, EightBit T>
HWY_INLINE hn::Vec<D> LoadF32(D d, const T* p) {
  return Widen(d, hn::LoadU(Signed8<D>(), Codes(p)), T());
}
template <class D, EightBit T>
HWY_INLINE hn::Vec<D> LoadF32N(D d, const T* p, size_t n) {
  return Widen(d, LoadFirst(Signed8<D>(), Codes(p), n), T());
}
template <class D, EightBit T>
HWY_INLINE hn::Vec<D> LoadF32N(D d, const T* p, WholeVector) {
  return LoadF32(d, p);
}
template <class D, EightBit T>
HWY_INLINE void StoreCodes(hn::Vec<Signed8<D>> codes, D, T* p, size_t n) {
  StoreFirst(codes, Signed8<D>(), Codes(p), n);
}
template <class D, EightBit T>
HWY_INLINE void StoreCodes(hn::Vec<Signed8<D>> codes, D, T* p, WholeVector) {
  hn::StoreU(codes, Signed8<D>(), Codes(p));
}
template <class D, EightBit T>
HWY_INLINE void StoreF32N(hn::Vec<D> v, D d, T* p, size_t n) {
  StoreCodes(Narrow(d, v, T()), d, p, n);
}
template <class D, EightBit T>
HWY_INLINE void StoreF32N(hn::Vec<D> v, D d, T* p, WholeVector n) {
  StoreCodes(Narrow(d, v, T()), d, p, n);
}
// Of values that NarrowWithin takes.
template <class D, EightBit T, class N>
HWY_INLINE void StoreWithinF32N(hn::Vec<D> v, D d, T* p, N n) {
  StoreCodes(NarrowWithin(d, v, T()), d, p, n);
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
