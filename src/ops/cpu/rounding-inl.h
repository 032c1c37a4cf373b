// Stochastic rounding to 16 bits, compiled once per instruction set (included after
// foreach_target.h). A value goes away from zero where the first 16 bits of what is cut off and its
// 16 random bits carry.
#if defined(REPLAYSSM_OPS_CPU_ROUNDING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_ROUNDING_INL_H_
#undef REPLAYSSM_OPS_CPU_ROUNDING_INL_H_
#else
#define REPLAYSSM_OPS_CPU_ROUNDING_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "ops/cpu/recurrent-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

using DU = hn::RebindToUnsigned<D>;
using VU = hn::Vec<DU>;

// The halves of the products of all lanes.
HWY_INLINE void multiply_wide(VU a, uint32_t factor, VU& high, VU& low) {
  const DU du;
#if HWY_TARGET == HWY_SCALAR
  const uint64_t product = uint64_t{hn::GetLane(a)} * factor;
  high = hn::Set(du, static_cast<uint32_t>(product >> 32));
  low = hn::Set(du, static_cast<uint32_t>(product));
#else
  const hn::RepartitionToWide<DU> du64;
  const auto b = hn::Set(du, factor);
  const auto even = hn::MulEven(a, b);
  const auto odd = hn::MulEven(hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(du64, a))), b);
  high = hn::OddEven(hn::BitCast(du, odd), hn::BitCast(du, hn::ShiftRight<32>(even)));
  low = hn::OddEven(hn::BitCast(du, hn::ShiftLeft<32>(odd)), hn::BitCast(du, even));
#endif
}

// core/philox.h with one counter per lane.
HWY_INLINE void philox_lanes(uint64_t key, VU counter[4]) {
  const DU du;
  auto key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    VU left_high, left_low, right_high, right_low;
    multiply_wide(counter[0], 0xd2511f53u, left_high, left_low);
    multiply_wide(counter[2], 0xcd9e8d57u, right_high, right_low);
    counter[0] = hn::Xor(right_high, hn::Xor(counter[1], hn::Set(du, key0)));
    counter[1] = right_low;
    counter[2] = hn::Xor(left_high, hn::Xor(counter[3], hn::Set(du, key1)));
    counter[3] = left_low;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
}

// Elements of a row that share a number of the generator.
inline constexpr int64_t kRoundingGroup = 8;

// The random bits of one row of a state.
class RowBits {
 public:
  // `counter`: the token counter behind the last stored token; `row` is counted within the slot.
  RowBits(uint64_t seed, int64_t counter, uint32_t stream, int64_t row, int64_t state_dim) {
    const DU du;
    const int64_t groups = (state_dim + kRoundingGroup - 1) / kRoundingGroup;
    for (int64_t g = 0; g < groups; g += kLanes) {
      VU words[4] = {hn::Set(du, static_cast<uint32_t>(counter)),
                     hn::Set(du, static_cast<uint32_t>(counter >> 32)), hn::Set(du, stream),
                     hn::Iota(du, static_cast<uint32_t>(row * groups + g))};
      philox_lanes(seed, words);
      hn::StoreInterleaved4(words[0], words[1], words[2], words[3], du, words_ + 4 * g);
    }
  }
  // Of the elements from `column` on, which a vector's length divides.
  HWY_INLINE VU of(int64_t column) const {
    const hn::Rebind<uint16_t, D> du16;
    return hn::PromoteTo(DU(), hn::Load(du16, reinterpret_cast<const uint16_t*>(words_) + column));
  }

 private:
  HWY_ALIGN uint32_t words_[kMaxStateDim / 2 + 4 * kLanes];
};

HWY_INLINE VU round_stochastic(V v, VU random, bf16) {
  const DU du;
  const auto bits = hn::BitCast(du, v);
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x400000u));
  return hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, hn::Add(bits, random)));
}

HWY_INLINE VU round_stochastic(V v, VU random, fp16) {
  const DU du;
  const auto size = hn::Abs(v);
  const auto bits = hn::BitCast(du, size);
  // The 13 bits that are cut off meet the first 13 random ones.
  const auto sum = hn::Add(bits, hn::ShiftRight<3>(random));
  const auto normal = hn::ShiftRight<13>(hn::Sub(sum, hn::Set(du, 112u << 23)));
  const auto units = hn::ConvertTo(hn::RebindToSigned<D>(), hn::Mul(size, hn::Set(D(), 0x1p40f)));
  const auto subnormal = hn::ShiftRight<16>(hn::Add(hn::BitCast(du, units), random));
  auto code = hn::IfThenElse(hn::Lt(bits, hn::Set(du, 0x38800000u)), subnormal, normal);
  code = hn::Min(code, hn::Set(du, 0x7c00u));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
  code = hn::IfThenElse(is_nan, hn::Set(du, 0x7e00u), code);
  const auto sign = hn::And(hn::BitCast(du, v), hn::Set(du, 0x80000000u));
  return hn::Or(code, hn::ShiftRight<16>(sign));
}

// `row`: `count` floats in scratch memory.
template <class T>
void store_stochastic(const float* row, int64_t count, const RowBits& random, T* to) {
  const D d;
  const hn::Rebind<uint16_t, D> du16;
  ForVectors(d, static_cast<size_t>(count), [&](size_t i, auto n) {
    const auto wide =
        round_stochastic(hn::Load(d, row + i), random.of(static_cast<int64_t>(i)), T());
    const auto code = replayssm::HWY_NAMESPACE::Low16(d, wide);
    if constexpr (std::is_same_v<decltype(n), size_t>) {
      replayssm::HWY_NAMESPACE::StoreFirst(code, du16, &to[i].bits, n);
    } else {
      hn::StoreU(code, du16, &to[i].bits);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
