// Rows of a state in registers and the arithmetic that all kernels of the recurrence share,
// compiled once per instruction set (included after foreach_target.h).
//
// Every update of a row goes through `dot`, which adds in one order: that is what makes a fold and
// a conventional update agree bit for bit. Readouts go through `dots`.
#if defined(REPLAYSSM_OPS_CPU_RECURRENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_RECURRENT_INL_H_
#undef REPLAYSSM_OPS_CPU_RECURRENT_INL_H_
#else
#define REPLAYSSM_OPS_CPU_RECURRENT_INL_H_
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "ops/cpu/recurrent_blocks.h"
#include "ops/cpu/simd-inl.h"
#include "ops/cpu/simd8-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using replayssm::HWY_NAMESPACE::ExpF32;
using replayssm::HWY_NAMESPACE::ForVectors;
using replayssm::HWY_NAMESPACE::kLoadFactor;
using replayssm::HWY_NAMESPACE::LoadF32;
using replayssm::HWY_NAMESPACE::LoadF32N;
using replayssm::HWY_NAMESPACE::SigmoidF32;
using replayssm::HWY_NAMESPACE::SiluF32;
using replayssm::HWY_NAMESPACE::StoreF32;
using replayssm::HWY_NAMESPACE::StoreF32N;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
inline constexpr size_t kLanes = hn::MaxLanes(D());
static_assert(kPadFloats % kLanes == 0);

// The length of a state row: a compile-time number of whole vectors, or (kVecs = 0) any.
template <size_t kVecs>
struct RowWidth {
  explicit RowWidth(int64_t) {}
  static constexpr size_t vecs() { return kVecs; }
};
template <>
struct RowWidth<0> {
  explicit RowWidth(int64_t state_dim)
      : full(static_cast<size_t>(state_dim) / kLanes),
        tail(static_cast<size_t>(state_dim) % kLanes) {}
  size_t vecs() const { return full + (tail != 0); }
  size_t full, tail;
};

template <size_t kVecs>
struct Row {
  V v[kVecs > 0 ? kVecs : kMaxStateDim / kLanes];
};

template <size_t kVecs, class T>
HWY_INLINE void load_row(const T* p, const RowWidth<kVecs>& width, Row<kVecs>& row) {
  const D d;
  if constexpr (kVecs > 0) {
    for (size_t i = 0; i < kVecs; ++i) row.v[i] = LoadF32(d, p + i * kLanes);
  } else {
    for (size_t i = 0; i < width.full; ++i) row.v[i] = LoadF32(d, p + i * kLanes);
    if (width.tail) row.v[width.full] = LoadF32N(d, p + width.full * kLanes, width.tail);
  }
}

template <size_t kVecs, class T>
HWY_INLINE void store_row(const Row<kVecs>& row, const RowWidth<kVecs>& width, T* p) {
  const D d;
  if constexpr (kVecs > 0) {
    for (size_t i = 0; i < kVecs; ++i) StoreF32(row.v[i], d, p + i * kLanes);
  } else {
    for (size_t i = 0; i < width.full; ++i) StoreF32(row.v[i], d, p + i * kLanes);
    if (width.tail) StoreF32N(row.v[width.full], d, p + width.full * kLanes, width.tail);
  }
}

// All vectors of a row, to scratch memory.
template <size_t kVecs>
HWY_INLINE void store_vectors(const Row<kVecs>& row, const RowWidth<kVecs>& width, float* p) {
  for (size_t i = 0; i < width.vecs(); ++i) hn::Store(row.v[i], D(), p + i * kLanes);
}

// Most rows of a state that `dots` takes together.
inline constexpr int64_t kDotRows = kLanes >= 4 ? 4 : 1;

#if HWY_TARGET == HWY_SCALAR
HWY_INLINE V sums_of_lanes(V x0, V, V, V) { return x0; }
#else
// Sums the lanes of four vectors: every block of four lanes holds the four sums.
HWY_INLINE V sums_of_lanes(V x0, V x1, V x2, V x3) {
  const D d;
  const hn::RepartitionToWide<D> pairs;
  const auto halves = [&](V x, V y) {
    return hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, x, y), hn::InterleaveUpper(d, x, y)));
  };
  const auto low = halves(x0, x1), high = halves(x2, x3);
  auto sum = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, low, high)),
                     hn::BitCast(d, hn::InterleaveUpper(pairs, low, high)));
  if constexpr (kLanes >= 8) sum = hn::Add(sum, hn::SwapAdjacentBlocks(sum));
  if constexpr (kLanes >= 16) sum = hn::Add(sum, hn::ConcatLowerUpper(d, sum, sum));
  return sum;
}
#endif

// The products of a row and t, summed over its vectors: even and odd ones apart, then together.
template <size_t kVecs>
HWY_INLINE V multiply_row(const Row<kVecs>& row, const float* t, const RowWidth<kVecs>& width) {
  const D d;
  V even = hn::Zero(d), odd = hn::Zero(d);
  size_t i = 0;
  for (; i + 1 < width.vecs(); i += 2) {
    even = hn::MulAdd(row.v[i], hn::Load(d, t + i * kLanes), even);
    odd = hn::MulAdd(row.v[i + 1], hn::Load(d, t + (i + 1) * kLanes), odd);
  }
  if (i < width.vecs()) even = hn::MulAdd(row.v[i], hn::Load(d, t + i * kLanes), even);
  return hn::Add(even, odd);
}

// row . t, in all lanes.
template <size_t kVecs>
HWY_INLINE V dot(const Row<kVecs>& row, const float* t, const RowWidth<kVecs>& width) {
  return hn::SumOfLanes(D(), multiply_row(row, t, width));
}

// row . t for kRows rows (at most kDotRows), row r in lane r mod kRows of every block. The order of
// the sum does not depend on kRows.
template <size_t kVecs, size_t kRows>
HWY_INLINE V dots(const Row<kVecs>* rows, const float* t, const RowWidth<kVecs>& width) {
  static_assert(kRows <= kDotRows && 4 % kRows == 0);
  V x[kRows];
  for (size_t r = 0; r < kRows; ++r) x[r] = multiply_row(rows[r], t, width);
  return sums_of_lanes(x[0], x[1 % kRows], x[2 % kRows], x[3 % kRows]);
}

// One number in all lanes, or four (kRows) as `dots` returns them.
template <size_t kRows>
HWY_INLINE V load_lanes(const float* p) {
  static_assert(kRows == 1 || kRows == 4);
  if constexpr (kRows == 1) return hn::Set(D(), p[0]);
  if constexpr (kRows == 4) return hn::LoadDup128(D(), p);
}

// o += the first kRows lanes.
template <size_t kRows>
HWY_INLINE void add_lanes(V x, float* o) {
  HWY_ALIGN float lanes[kLanes];
  hn::Store(x, D(), lanes);
  for (size_t r = 0; r < kRows; ++r) o[r] += lanes[r];
}

// x . y over scratch rows of `count` floats, a multiple of kPadFloats; in all lanes.
HWY_INLINE V dot_memory(const float* x, const float* y, int64_t count) {
  const D d;
  V even = hn::Zero(d), odd = hn::Zero(d);
  size_t i = 0;
  const size_t n = static_cast<size_t>(count);
  for (; i + kLanes < n; i += 2 * kLanes) {
    even = hn::MulAdd(hn::Load(d, x + i), hn::Load(d, y + i), even);
    odd = hn::MulAdd(hn::Load(d, x + i + kLanes), hn::Load(d, y + i + kLanes), odd);
  }
  if (i < n) even = hn::MulAdd(hn::Load(d, x + i), hn::Load(d, y + i), even);
  return hn::SumOfLanes(d, hn::Add(even, odd));
}

// A row's decay: one number, or one per column.
template <Family kFamily>
HWY_INLINE auto decays(const StepScratch& m, const HeadScratch& head, int64_t j) {
  if constexpr (kFamily == Family::kKimiDelta) {
    return static_cast<const float*>(head.a + j * m.width);
  } else {
    return head.a[j];
  }
}
HWY_INLINE V load_decay(float decay, int64_t) { return hn::Set(D(), decay); }
HWY_INLINE V load_decay(const float* decay, int64_t x) { return hn::Load(D(), decay + x); }

// Asks for `count` elements at p, some hundred nanoseconds before they are read.
template <class T>
HWY_INLINE void prefetch(const T* p, int64_t count) {
  const auto* line = reinterpret_cast<const char*>(p);
  for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(T)); i += 64)
    __builtin_prefetch(line + i, 0, 2);
}

// y = x as floats, zero from `count` to `width`.
template <class T>
HWY_INLINE void to_padded_floats(const T* x, int64_t count, int64_t width, float* y) {
  const D d;
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kLanes) <= count; i += kLanes)
    hn::Store(LoadF32(d, x + i), d, y + i);
  if (i < count) {
    hn::Store(LoadF32N(d, x + i, static_cast<size_t>(count - i)), d, y + i);
    i += kLanes;
  }
  for (; i < width; i += kLanes) hn::Store(hn::Zero(d), d, y + i);
}

// x <- x scale / sqrt(|x|^2 + kL2NormEps) over a scratch row.
HWY_INLINE void l2_normalise(int64_t width, float scale, float* x) {
  const D d;
  const float sum = hn::GetLane(dot_memory(x, x, width)) + kL2NormEps;
  const auto factor = hn::Set(d, scale / std::sqrt(sum));
  for (int64_t i = 0; i < width; i += kLanes)
    hn::Store(hn::Mul(hn::Load(d, x + i), factor), d, x + i);
}

// x <- exp(x); writes up to padded(count).
HWY_INLINE void exponentials(int64_t count, float* x) {
  const D d;
  for (int64_t i = 0; i < count; i += kLanes) hn::Store(ExpF32(d, hn::Load(d, x + i)), d, x + i);
}

// Calls fn<kVecs>() with the row width's fast path, or with 0. Short vectors have none: a row would
// not fit into their registers.
template <class Fn>
HWY_INLINE void dispatch_width(int64_t state_dim, Fn&& fn) {
  if constexpr (kLanes >= 8) {
    switch (state_dim) {
      case 64: return fn.template operator()<64 / kLanes>();
      case 80: return fn.template operator()<80 / kLanes>();
      case 128: return fn.template operator()<128 / kLanes>();
      case 256: return fn.template operator()<256 / kLanes>();
      default: break;
    }
  }
  fn.template operator()<0>();
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
