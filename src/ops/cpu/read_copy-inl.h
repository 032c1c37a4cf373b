// Readouts from read copies, compiled once per instruction set (included after foreach_target.h).
#if defined(REPLAYSSM_OPS_CPU_READ_COPY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_READ_COPY_INL_H_
#undef REPLAYSSM_OPS_CPU_READ_COPY_INL_H_
#else
#define REPLAYSSM_OPS_CPU_READ_COPY_INL_H_
#endif

#include <algorithm>

#include "core/dispatch.h"
#include "ops/cpu/recurrent_stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

// The read copy of one head.
template <class T>
struct HeadCopy {
  HeadCopy(const ReadCopy& copy, const RecurrentShape& shape, int64_t slot, int64_t head) {
    const int64_t row = (slot * shape.heads + head) * shape.head_dim;
    data = static_cast<const T*>(copy.data) + row * shape.state_dim;
    if (sizeof(T) == 1) scale = copy.scale + row;
  }
  // What the loaded elements of a row are to be multiplied by.
  float factor(int64_t row) const { return sizeof(T) == 1 ? scale[row] * kLoadFactor<T> : 1.0f; }

  const T* data;
  const float* scale = nullptr;
};

// Adds S t to every output of the window for kRows rows of S.
template <size_t kVecs, int64_t kRows, class T>
HWY_INLINE void read_rows(const HeadCopy<T>& copy, const Replay& replay, const StepScratch& m,
                          const HeadScratch& head, const RowWidth<kVecs>& width, int64_t state_dim,
                          int64_t row, Prefetcher& prefetcher) {
  const T* rows = copy.data + row * state_dim;
  Row<kVecs> s[kRows];
  for (int64_t r = 0; r < kRows; ++r) load_row(rows + r * state_dim, width, s[r]);
  prefetcher.reading(rows, 2 * kRows * state_dim * static_cast<int64_t>(sizeof(T)));
  for (int64_t i = 0; i < replay.window; ++i) {
    float* o = head.o + i * m.height + row;
    for (int64_t r = 0; r < kRows; ++r)
      o[r] += copy.factor(row + r) * hn::GetLane(dot(s[r], head.t + i * m.width, width));
  }
}

template <size_t kVecs, class T>
void read_head(const HeadCopy<T>& copy, const Replay& replay, const StepScratch& m,
               const HeadScratch& head, const RecurrentShape& shape, Prefetcher& prefetcher) {
  constexpr int64_t kRows = kVecs > 0 ? std::clamp<int64_t>(16 / kVecs, 1, 2) : 1;
  const RowWidth<kVecs> width(shape.state_dim);
  int64_t row = 0;
  for (; row + kRows <= shape.head_dim; row += kRows)
    read_rows<kVecs, kRows>(copy, replay, m, head, width, shape.state_dim, row, prefetcher);
  for (; row < shape.head_dim; ++row)
    read_rows<kVecs, 1>(copy, replay, m, head, width, shape.state_dim, row, prefetcher);
}

// The copy's values as [head_dim, state_dim] floats.
template <class T>
void decode_head(const HeadCopy<T>& copy, const RecurrentShape& shape, float* state) {
  const D d;
  for (int64_t row = 0; row < shape.head_dim; ++row) {
    const auto factor = hn::Set(d, copy.factor(row));
    const int64_t at = row * shape.state_dim;
    ForVectors(d, static_cast<size_t>(shape.state_dim), [&](size_t i, auto n) {
      StoreF32N(hn::Mul(LoadF32N(d, copy.data + at + i, n), factor), d, state + at + i, n);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
