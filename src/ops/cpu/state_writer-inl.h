// Rows of a state stored in all forms in which it is kept, compiled once per instruction set
// (included after foreach_target.h).
#if defined(REPLAYSSM_OPS_CPU_STATE_WRITER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_STATE_WRITER_INL_H_
#undef REPLAYSSM_OPS_CPU_STATE_WRITER_INL_H_
#else
#define REPLAYSSM_OPS_CPU_STATE_WRITER_INL_H_
#endif

#include <cstring>

#include "core/dispatch.h"
#include "ops/cpu/recurrent-inl.h"
#include "ops/cpu/rounding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

// y = `count` floats in scratch memory, zero up to a whole vector.
template <class T>
HWY_INLINE void store_floats(const float* x, int64_t count, T* y) {
  ForVectors(D(), static_cast<size_t>(count),
             [&](size_t i, auto n) { StoreF32N(hn::Load(D(), x + i), D(), y + i, n); });
}

// The scales of kRows 8-bit rows, as `dots` returns them; NaN where a row has one. `rows`: scratch
// memory, `stride` apart.
template <class T, size_t kRows>
HWY_INLINE V row_scales(const float* rows, int64_t stride, int64_t count) {
  const D d;
  V largest[kRows];
  for (size_t r = 0; r < kRows; ++r) largest[r] = hn::Zero(d);
  for (int64_t i = 0; i < count; i += kLanes) {
    for (size_t r = 0; r < kRows; ++r)
      largest[r] = larger_magnitude(largest[r], hn::Abs(hn::Load(d, rows + r * stride + i)));
  }
  const auto all = reduce_lanes([](V x, V y) { return larger_magnitude(x, y); }, largest[0],
                                largest[1 % kRows], largest[2 % kRows], largest[3 % kRows]);
  return hn::Div(all, hn::Set(d, dtype_max_8bit(dtype_of<T>())));
}

// x / divisor for quotients that are about to be rounded to few bits. Where the machine has fused
// products, by the reciprocal and one correction, which is exact at the middles between codes.
HWY_INLINE V divide(V x, V divisor, V reciprocal) {
#if HWY_NATIVE_FMA
  const auto quotient = hn::Mul(x, reciprocal);
  return hn::MulAdd(hn::NegMulAdd(quotient, divisor, x), reciprocal, quotient);
#else
  (void)reciprocal;
  return hn::Div(x, divisor);
#endif
}

// `rows`: kRows rows of `count` floats in scratch memory, `stride` apart, zero up to a whole
// vector.
template <class T, size_t kRows>
HWY_INLINE void store_copy_rows(const float* rows, int64_t stride, int64_t count, T* copy,
                                float* scale) {
  const D d;
  if constexpr (sizeof(T) == 1) {
    const auto scales = row_scales<T, kRows>(rows, stride, count);
    store_lanes<kRows>(scales, scale);
    // What is divided by a scale of zero is too small for any code but zero.
    const auto divisors = hn::IfThenElse(hn::Eq(scales, hn::Zero(d)), hn::Set(d, 1.0f), scales);
    V divisor[kRows], reciprocal[kRows];
    spread_lanes<kRows>(divisors, divisor);
    spread_lanes<kRows>(hn::Div(hn::Set(d, 1.0f), divisors), reciprocal);
    ForVectors(d, static_cast<size_t>(count), [&](size_t i, auto n) {
      for (size_t r = 0; r < kRows; ++r) {
        const auto x = hn::Load(d, rows + r * stride + i);
        StoreWithinF32N(divide(x, divisor[r], reciprocal[r]), d, copy + r * count + i, n);
      }
    });
  } else {
    for (size_t r = 0; r < kRows; ++r) store_floats(rows + r * stride, count, copy + r * count);
  }
}

// Stores rows of one head: checkpoint, rounded as the call asks for, and read copy.
class HeadWriter {
 public:
  // `counter`: the token counter behind the last token that is stored.
  HeadWriter(const RecurrentStepParams& p, int64_t slot, int64_t target, int64_t head,
             int64_t counter)
      : p_(p), slot_(slot), target_(target), head_(head), counter_(counter) {}

  // Whether storing is no more than to convert rows into the checkpoint that they came from.
  bool is_plain() const {
    return target_ == slot_ && p_.state.read_copy.data == nullptr && !rounds_stochastically();
  }

  // Rows [row, row + count) of the head, `stride` apart in scratch memory, each zero up to a whole
  // vector.
  void write(int64_t row, int64_t count, const float* rows, int64_t stride) const {
    for (int64_t r = 0; r < count; ++r) write_checkpoint(row + r, rows + r * stride);
    if (p_.state.read_copy.data == nullptr) return;
    int64_t r = 0;
    for (; r + kDotRows <= count; r += kDotRows)
      write_copy<kDotRows>(row + r, rows + r * stride, stride);
    for (; r < count; ++r) write_copy<1>(row + r, rows + r * stride, stride);
  }

 private:
  bool rounds_stochastically() const {
    return p_.rounding.seed != nullptr && p_.state.checkpoint_dtype != DType::kFloat32;
  }

  // The place of a row among those of all slots.
  int64_t place(int64_t row) const {
    return (target_ * p_.shape.heads + head_) * p_.shape.head_dim + row;
  }

  void write_checkpoint(int64_t row, const float* values) const {
    const int64_t size = p_.shape.state_dim;
    dispatch_float(p_.state.checkpoint_dtype, [&]<class StateT>() {
      StateT* to = static_cast<StateT*>(p_.state.checkpoint) + place(row) * size;
      if constexpr (sizeof(StateT) == 2) {
        if (rounds_stochastically()) {
          const RowBits random(p_.rounding.seed[slot_], counter_, p_.rounding.stream,
                               head_ * p_.shape.head_dim + row, size);
          return store_stochastic(values, size, random, to);
        }
      }
      store_floats(values, size, to);
    });
  }

  template <size_t kRows>
  void write_copy(int64_t row, const float* rows, int64_t stride) const {
    const ReadCopy& copy = p_.state.read_copy;
    const int64_t size = p_.shape.state_dim, at = place(row);
    dispatch_storage(copy.dtype, [&]<class CopyT>() {
      float* const scale = sizeof(CopyT) == 1 ? copy.scale + at : nullptr;
      store_copy_rows<CopyT, kRows>(rows, stride, size, static_cast<CopyT*>(copy.data) + at * size,
                                    scale);
    });
  }

  const RecurrentStepParams& p_;
  int64_t slot_, target_, head_, counter_;
};

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
