// Readouts of a head's state as it is stored, checkpoint or read copy, compiled once per
// instruction set (included after foreach_target.h).
#if defined(REPLAYSSM_OPS_CPU_RECURRENT_READ_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_RECURRENT_READ_INL_H_
#undef REPLAYSSM_OPS_CPU_RECURRENT_READ_INL_H_
#else
#define REPLAYSSM_OPS_CPU_RECURRENT_READ_INL_H_
#endif

#include "core/dispatch.h"
#include "ops/cpu/recurrent_stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

// The rows of one head.
template <class T>
struct StoredRows {
  static constexpr bool kScaled = sizeof(T) == 1;

  StoredRows(const void* states, const float* scales, const RecurrentShape& shape, int64_t slot,
             int64_t head) {
    const int64_t row = (slot * shape.heads + head) * shape.head_dim;
    data = static_cast<const T*>(states) + row * shape.state_dim;
    if (kScaled) scale = scales + row;
  }
  // What the loaded elements of kRows rows are to be multiplied by, in the lanes of `dots`.
  template <size_t kRows>
  HWY_INLINE V factors(int64_t row) const {
    if constexpr (!kScaled) return hn::Set(D(), 1.0f);
    return hn::Mul(load_lanes<kRows>(scale + row), hn::Set(D(), kLoadFactor<T>));
  }

  const T* data;
  const float* scale = nullptr;
};

// Vector i of a row.
template <size_t kVecs, class T>
HWY_INLINE V load_vector(const T* row, size_t i, const RowWidth<kVecs>& width) {
  if constexpr (kVecs == 0) {
    if (i == width.full) return LoadF32N(D(), row + i * kLanes, width.tail);
  }
  return LoadF32(D(), row + i * kLanes);
}

// Adds S t to the output for kRows rows of S and a window of one token: elements are used as they
// come.
template <size_t kVecs, size_t kRows, class T>
HWY_INLINE void read_rows(const StoredRows<T>& stored, const HeadScratch& head,
                          const RowWidth<kVecs>& width, int64_t state_dim, int64_t row) {
  const D d;
  const T* rows = stored.data + row * state_dim;
  V even[kRows], odd[kRows];
  for (size_t r = 0; r < kRows; ++r) even[r] = odd[r] = hn::Zero(d);
  size_t i = 0;
  for (; i + 1 < width.vecs(); i += 2) {
    const auto t0 = hn::Load(d, head.t + i * kLanes), t1 = hn::Load(d, head.t + (i + 1) * kLanes);
    for (size_t r = 0; r < kRows; ++r) {
      even[r] = hn::MulAdd(load_vector(rows + r * state_dim, i, width), t0, even[r]);
      odd[r] = hn::MulAdd(load_vector(rows + r * state_dim, i + 1, width), t1, odd[r]);
    }
  }
  if (i < width.vecs()) {
    const auto t0 = hn::Load(d, head.t + i * kLanes);
    for (size_t r = 0; r < kRows; ++r)
      even[r] = hn::MulAdd(load_vector(rows + r * state_dim, i, width), t0, even[r]);
  }
  for (size_t r = 0; r < kRows; ++r) even[r] = hn::Add(even[r], odd[r]);
  const auto sums = sums_of_lanes(even[0], even[1 % kRows], even[2 % kRows], even[3 % kRows]);
  add_lanes<kRows>(hn::Mul(sums, stored.template factors<kRows>(row)), head.o + row);
}

// The same for a longer window: kRows rows stay in registers.
template <size_t kVecs, size_t kRows, class T>
HWY_INLINE void read_rows_window(const StoredRows<T>& stored, int64_t window, const StepScratch& m,
                                 const HeadScratch& head, const RowWidth<kVecs>& width,
                                 int64_t state_dim, int64_t row) {
  const T* rows = stored.data + row * state_dim;
  Row<kVecs> s[kRows];
  for (size_t r = 0; r < kRows; ++r) load_row(rows + r * state_dim, width, s[r]);
  const auto factors = stored.template factors<kRows>(row);
  for (int64_t i = 0; i < window; ++i) {
    const auto products = dots<kVecs, kRows>(s, head.t + i * m.width, width);
    add_lanes<kRows>(hn::Mul(products, factors), head.o + i * m.height + row);
  }
}

// Adds S t to every output of the window.
template <size_t kVecs, class T>
void read_head(const StoredRows<T>& stored, int64_t window, const StepScratch& m,
               const HeadScratch& head, const RecurrentShape& shape, Prefetcher& prefetcher) {
  constexpr int64_t kTokenRows = kDotRows, kWindowRows = kVecs > 0 ? kDotRows : 1;
  const RowWidth<kVecs> width(shape.state_dim);
  const auto fetch = [&](int64_t row, int64_t rows) {
    prefetcher.reading(stored.data + row * shape.state_dim,
                       rows * shape.state_dim * static_cast<int64_t>(sizeof(T)));
  };
  int64_t row = 0;
  if (window == 1) {
    for (; row + kTokenRows <= shape.head_dim; row += kTokenRows) {
      fetch(row, kTokenRows);
      read_rows<kVecs, kTokenRows>(stored, head, width, shape.state_dim, row);
    }
    for (; row < shape.head_dim; ++row)
      read_rows<kVecs, 1>(stored, head, width, shape.state_dim, row);
    return;
  }
  for (; row + kWindowRows <= shape.head_dim; row += kWindowRows) {
    fetch(row, kWindowRows);
    read_rows_window<kVecs, kWindowRows>(stored, window, m, head, width, shape.state_dim, row);
  }
  for (; row < shape.head_dim; ++row)
    read_rows_window<kVecs, 1>(stored, window, m, head, width, shape.state_dim, row);
}

// The values as [head_dim, state_dim] floats.
template <class T>
void decode_head(const StoredRows<T>& stored, const RecurrentShape& shape, float* state) {
  const D d;
  for (int64_t row = 0; row < shape.head_dim; ++row) {
    const auto factor = stored.template factors<1>(row);
    const int64_t at = row * shape.state_dim;
    ForVectors(d, static_cast<size_t>(shape.state_dim), [&](size_t i, auto n) {
      StoreF32N(hn::Mul(LoadF32N(d, stored.data + at + i, n), factor), d, state + at + i, n);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
