// The readout of an int8 read copy by products of bytes: four bytes by four bytes are added to 32
// bits in one instruction, where as floats each byte is widened, converted and multiplied on its
// own.
//
// t becomes whole numbers of 24 bits, and these three signed bytes each. Sums of whole numbers are
// exact, so that their order does not matter.
#include "ops/cpu/recurrent_read_int8.h"

#include <algorithm>
#include <cstddef>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/recurrent_read_int8.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/cpu/recurrent-inl.h"

// Instructions that the machine may lack beside the rest of AVX-512: Highway 1.0.3 does not ask.
#if HWY_TARGET == HWY_AVX3
HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni")
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

using Bytes = hn::ScalableTag<int8_t>;
using Words = hn::ScalableTag<int32_t>;
using VBytes = hn::Vec<Bytes>;
using VWords = hn::Vec<Words>;
constexpr size_t kByteLanes = hn::MaxLanes(Bytes());
constexpr size_t kDigits = 3;
// Columns for which the sum of the lower two digits' products fits in 32 bits.
constexpr int64_t kMostColumns = 256;

// sum + x . y by fours of bytes, those of x without a sign.
HWY_INLINE VWords multiply_add(VBytes x, VBytes y, VWords sum) {
  return VWords{_mm512_dpbusd_epi32(sum.raw, x.raw, y.raw)};
}

// A byte with a sign, plus 128, as one without.
HWY_INLINE VBytes without_sign(VBytes x) { return hn::Xor(x, hn::Set(Bytes(), int8_t{-128})); }

// t = unit sum_n 256^n digit_n, lowest digit first.
template <size_t kVecs>
class Digits {
 public:
  Digits(const float* t, int64_t state_dim) {
    const D d;
    auto largest = hn::Set(d, kSmallest);
    for (int64_t i = 0; i < padded(state_dim); i += kLanes)
      largest = larger_magnitude(largest, hn::Abs(hn::Load(d, t + i)));
    const auto size = hn::BitCast(d, hn::MaxOfLanes(Words(), hn::BitCast(Words(), largest)));
    unit = hn::GetLane(size) / kMost;
    const auto per_unit = hn::Div(hn::Set(d, kMost), size);

    HWY_ALIGN int8_t bytes[kDigits][kVecs * kByteLanes] = {};
    for (int64_t i = 0; i < padded(state_dim); i += kLanes) {
      auto rest = hn::NearestInt(hn::Mul(hn::Load(d, t + i), per_unit));
      for (size_t n = 0; n < kDigits; ++n) {
        // The lowest byte with its sign; what is left is a multiple of 256.
        const auto digit = hn::ShiftRight<24>(hn::ShiftLeft<24>(rest));
        hn::Store(hn::DemoteTo(Digit(), n + 1 < kDigits ? digit : rest), Digit(), bytes[n] + i);
        rest = hn::ShiftRight<8>(hn::Sub(rest, digit));
      }
    }
    const auto offset = hn::Set(Bytes(), int8_t{-128});
    for (size_t n = 0; n < kDigits; ++n) {
      auto sum = hn::Zero(Words());
      for (size_t i = 0; i < kVecs; ++i) {
        digit[n][i] = hn::Load(Bytes(), bytes[n] + i * kByteLanes);
        sum = multiply_add(offset, digit[n][i], sum);
      }
      start[n] = hn::Neg(sum);
    }
  }

  VBytes digit[kDigits][kVecs];
  VWords start[kDigits];  // what products of bytes plus 128 have too much, with the other sign
  float unit;

 private:
  using Digit = hn::Rebind<int8_t, D>;
  // The largest whole number: its highest digit fits in a byte with the carries of the others. And
  // what the largest element counts for at least.
  static constexpr float kMost = 8355000, kSmallest = 0x1p-100f;
};

// Codes of kRows rows by the digits of t: sums by lanes, of the lower two digits and of the
// highest.
template <size_t kVecs, size_t kRows, class Mask>
HWY_INLINE V multiply_rows(const int8_t* codes, int64_t stride, Mask last, const Digits<kVecs>& t) {
  const Bytes d;
  VWords sum[kRows][kDigits];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t n = 0; n < kDigits; ++n) sum[r][n] = t.start[n];
  }
  for (size_t i = 0; i < kVecs; ++i) {
    for (size_t r = 0; r < kRows; ++r) {
      const int8_t* const at = codes + r * stride + i * kByteLanes;
      const auto x = without_sign(i + 1 < kVecs ? hn::LoadU(d, at) : hn::MaskedLoad(last, d, at));
      for (size_t n = 0; n < kDigits; ++n) sum[r][n] = multiply_add(x, t.digit[n][i], sum[r][n]);
    }
  }
  const D floats;
  V low[kRows], high[kRows];
  for (size_t r = 0; r < kRows; ++r) {
    low[r] = hn::BitCast(floats, hn::Add(sum[r][0], hn::ShiftLeft<8>(sum[r][1])));
    high[r] = hn::BitCast(floats, sum[r][2]);
  }
  const auto total = [&](const V(&x)[kRows]) {
    const auto add = [&](V a, V b) {
      return hn::BitCast(floats, hn::Add(hn::BitCast(Words(), a), hn::BitCast(Words(), b)));
    };
    const auto all = reduce_lanes(add, x[0], x[1 % kRows], x[2 % kRows], x[3 % kRows]);
    return hn::ConvertTo(floats, hn::BitCast(Words(), all));
  };
  return hn::MulAdd(total(high), hn::Set(floats, 65536.0f), total(low));
}

template <size_t kVecs>
void read(const Int8Rows& rows, const float* t, float* o, Prefetcher& prefetcher) {
  const Digits<kVecs> digits(t, rows.state_dim);
  const auto last = hn::FirstN(Bytes(), rows.state_dim - (kVecs - 1) * kByteLanes);
  const auto take = [&]<size_t kRows>(int64_t row) {
    const int8_t* const codes = rows.codes + row * rows.state_dim;
    const auto factors = hn::Mul(load_lanes<kRows>(rows.scale + row), hn::Set(D(), digits.unit));
    add_lanes<kRows>(
        hn::Mul(multiply_rows<kVecs, kRows>(codes, rows.state_dim, last, digits), factors),
        o + row);
  };
  int64_t row = 0;
  for (; row + kDotRows <= rows.head_dim; row += kDotRows) {
    prefetcher.reading(rows.codes + row * rows.state_dim, kDotRows * rows.state_dim);
    take.template operator()<kDotRows>(row);
  }
  for (; row < rows.head_dim; ++row) take.template operator()<1>(row);
}

bool read_by_bytes(const Int8Rows& rows, const float* t, float* o, Prefetcher& prefetcher) {
  static_assert(kMostColumns == 4 * kByteLanes);
  switch ((static_cast<size_t>(rows.state_dim) + kByteLanes - 1) / kByteLanes) {
    case 1: read<1>(rows, t, o, prefetcher); return true;
    case 2: read<2>(rows, t, o, prefetcher); return true;
    case 3: read<3>(rows, t, o, prefetcher); return true;
    case 4: read<4>(rows, t, o, prefetcher); return true;
    default: return false;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_POP_ATTRIBUTES
#endif

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

bool read_rows_int8([[maybe_unused]] const Int8Rows& rows, [[maybe_unused]] const float* t,
                    [[maybe_unused]] float* o, [[maybe_unused]] Prefetcher& prefetcher) {
#if HWY_TARGET == HWY_AVX3
  return __builtin_cpu_supports("avx512vnni") && read_by_bytes(rows, t, o, prefetcher);
#else
  return false;
#endif
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm::cpu {

HWY_EXPORT(read_rows_int8);

bool read_int8(const Int8Rows& rows, const float* t, float* o, Prefetcher& prefetcher) {
  return HWY_DYNAMIC_DISPATCH(read_rows_int8)(rows, t, o, prefetcher);
}

}  // namespace replayssm::cpu
#endif  // HWY_ONCE
