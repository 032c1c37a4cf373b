// Rows of a state in registers and the arithmetic that all kernels of the recurrence share,
// compiled once per instruction set (included after foreach_target.h).
//
// Every product of a row goes through `dots`, which adds in one order whatever the number of rows:
// that is what makes a fold and a conventional update agree bit for bit.
#if defined(REPLAYSSM_OPS_CPU_RECURRENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_RECURRENT_INL_H_
#undef REPLAYSSM_OPS_CPU_RECURRENT_INL_H_
#else
#define REPLAYSSM_OPS_CPU_RECURRENT_INL_H_
#endif

#include <algorithm>
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
using replayssm::HWY_NAMESPACE::Codes;
using replayssm::HWY_NAMESPACE::ExpF32;
using replayssm::HWY_NAMESPACE::ForVectors;
using replayssm::HWY_NAMESPACE::kLoadFactor;
using replayssm::HWY_NAMESPACE::LoadF32;
using replayssm::HWY_NAMESPACE::LoadF32N;
using replayssm::HWY_NAMESPACE::SigmoidF32;
using replayssm::HWY_NAMESPACE::SiluF32;
using replayssm::HWY_NAMESPACE::StoreF32;
using replayssm::HWY_NAMESPACE::StoreF32N;
using replayssm::HWY_NAMESPACE::StoreWithinF32N;
using replayssm::HWY_NAMESPACE::SumF32;

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

// Reduces the lanes of four vectors: every block of four lanes holds the four results. `op` is
// commutative; its order is fixed.
template <class Op>
HWY_INLINE V reduce_lanes([[maybe_unused]] Op&& op, V x0, [[maybe_unused]] V x1,
                          [[maybe_unused]] V x2, [[maybe_unused]] V x3) {
#if HWY_TARGET == HWY_SCALAR
  return x0;
#else
  const D d;
  const hn::RepartitionToWide<D> pairs;
  const auto halves = [&](V x, V y) {
    return hn::BitCast(pairs, op(hn::InterleaveLower(d, x, y), hn::InterleaveUpper(d, x, y)));
  };
  const auto low = halves(x0, x1), high = halves(x2, x3);
  auto all = op(hn::BitCast(d, hn::InterleaveLower(pairs, low, high)),
                hn::BitCast(d, hn::InterleaveUpper(pairs, low, high)));
  if constexpr (kLanes >= 8) all = op(all, hn::SwapAdjacentBlocks(all));
  if constexpr (kLanes >= 16) all = op(all, hn::ConcatLowerUpper(d, all, all));
  return all;
#endif
}
// Of two magnitudes, NaN being above all: as integers they are ordered like numbers.
HWY_INLINE V larger_magnitude(V x, V y) {
  const hn::RebindToSigned<D> di;
  return hn::BitCast(D(), hn::Max(hn::BitCast(di, x), hn::BitCast(di, y)));
}
HWY_INLINE V sums_of_lanes(V x0, V x1, V x2, V x3) {
  return reduce_lanes([](V x, V y) { return hn::Add(x, y); }, x0, x1, x2, x3);
}

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

// row . t for kRows rows (at most kDotRows), row r in lane r mod kRows of every block. The order of
// the sum does not depend on kRows.
template <size_t kVecs, size_t kRows>
HWY_INLINE V dots(const Row<kVecs>* rows, const float* t, const RowWidth<kVecs>& width) {
  static_assert(kRows <= kDotRows && 4 % kRows == 0);
  V x[kRows];
  for (size_t r = 0; r < kRows; ++r) x[r] = multiply_row(rows[r], t, width);
  return sums_of_lanes(x[0], x[1 % kRows], x[2 % kRows], x[3 % kRows]);
}

// kRows numbers as `dots` returns them.
template <size_t kRows>
HWY_INLINE V load_lanes(const float* p) {
  static_assert(kRows == 1 || kRows == 2 || kRows == 4);
  if constexpr (kRows == 1) return hn::Set(D(), p[0]);
  if constexpr (kRows == 2) return hn::OddEven(hn::Set(D(), p[1]), hn::Set(D(), p[0]));
  if constexpr (kRows == 4) return hn::LoadDup128(D(), p);
}

// Each of kRows numbers, as `dots` returns them, in all lanes of its own vector.
template <size_t kRows>
HWY_INLINE void spread_lanes(V x, V (&each)[kRows]) {
  if constexpr (kRows == 1) {
    each[0] = x;
  } else {
    each[0] = hn::Broadcast<0>(x);
    each[1] = hn::Broadcast<1>(x);
    if constexpr (kRows == 4) {
      each[2] = hn::Broadcast<2>(x);
      each[3] = hn::Broadcast<3>(x);
    }
  }
}

// o = the first kRows lanes.
template <size_t kRows>
HWY_INLINE void store_lanes(V x, float* o) {
  HWY_ALIGN float lanes[kLanes];
  hn::Store(x, D(), lanes);
  std::copy_n(lanes, kRows, o);
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

// y = x scale / sqrt(|x|^2 + kL2NormEps) as floats, zero from `count` to `width`.
template <class T>
void to_unit_floats(const T* x, int64_t count, int64_t width, float scale, float* y) {
  const D d;
  dispatch_width(count, [&]<size_t kVecs>() {
    const RowWidth<kVecs> vectors(count);
    Row<kVecs> row;
    load_row(x, vectors, row);
    V even = hn::Zero(d), odd = hn::Zero(d);
    size_t i = 0;
    for (; i + 1 < vectors.vecs(); i += 2) {
      even = hn::MulAdd(row.v[i], row.v[i], even);
      odd = hn::MulAdd(row.v[i + 1], row.v[i + 1], odd);
    }
    if (i < vectors.vecs()) even = hn::MulAdd(row.v[i], row.v[i], even);
    const float sum = SumF32(d, hn::Add(even, odd)) + kL2NormEps;
    const auto factor = hn::Set(d, scale / std::sqrt(sum));
    for (i = 0; i < vectors.vecs(); ++i) hn::Store(hn::Mul(row.v[i], factor), d, y + i * kLanes);
    for (i *= kLanes; i < static_cast<size_t>(width); i += kLanes) hn::Store(hn::Zero(d), d, y + i);
  });
}

// A token's k and q as the recurrence takes them, in scratch rows of `width` floats. `unit`: of the
// delta rule.
template <class T>
void gather_key(bool unit, const T* x, int64_t state_dim, int64_t width, float* k) {
  if (!unit) return to_padded_floats(x, state_dim, width, k);
  to_unit_floats(x, state_dim, width, 1.0f, k);
}
template <class T>
void gather_query(bool unit, const T* x, int64_t state_dim, int64_t width, float* q) {
  if (!unit) return to_padded_floats(x, state_dim, width, q);
  to_unit_floats(x, state_dim, width, 1.0f / std::sqrt(static_cast<float>(state_dim)), q);
}

// A token's v as the recurrence takes it, in a scratch row of `height` floats: Mamba-2's is already
// multiplied by its write strength b.
template <Family kFamily, class T>
void gather_value(const T* x, float b, int64_t head_dim, int64_t height, float* v) {
  const D d;
  to_padded_floats(x, head_dim, height, v);
  if constexpr (is_delta(kFamily)) return;
  for (int64_t i = 0; i < height; i += kLanes)
    hn::Store(hn::Mul(hn::Set(d, b), hn::Load(d, v + i)), d, v + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
