// Rows of a state stored in all forms in which it is kept, compiled once per instruction set
// (included after foreach_target.h).
#if defined(REPLAYSSM_OPS_CPU_STATE_WRITER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_STATE_WRITER_INL_H_
#undef REPLAYSSM_OPS_CPU_STATE_WRITER_INL_H_
#else
#define REPLAYSSM_OPS_CPU_STATE_WRITER_INL_H_
#endif

#include <bit>
#include <cstring>

#include "core/dispatch.h"
#include "ops/cpu/recurrent-inl.h"
#include "ops/cpu/rounding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

// The scale of an 8-bit row; NaN where the row has one. `row`: scratch memory.
template <class T>
float row_scale(const float* row, int64_t count) {
  // As integers, magnitudes are ordered like numbers and NaN is above all.
  const hn::RebindToSigned<D> di;
  auto largest = hn::Zero(di);
  for (int64_t i = 0; i < count; i += kLanes)
    largest = hn::Max(largest, hn::BitCast(di, hn::Abs(hn::Load(D(), row + i))));
  return std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(di, largest))) /
         dtype_max_8bit(dtype_of<T>());
}

// Divides by one number: x / divisor for quotients that are about to be rounded to few bits. Where
// the machine has fused products, by its reciprocal and one correction, which is exact at the
// middles between codes.
class Divider {
 public:
  explicit Divider(float divisor)
      : divisor_(hn::Set(D(), divisor)), reciprocal_(hn::Set(D(), 1.0f / divisor)) {}
  HWY_INLINE V operator()(V x) const {
#if HWY_NATIVE_FMA
    const auto quotient = hn::Mul(x, reciprocal_);
    return hn::MulAdd(hn::NegMulAdd(quotient, divisor_, x), reciprocal_, quotient);
#else
    return hn::Div(x, divisor_);
#endif
  }

 private:
  V divisor_, reciprocal_;
};

// `row`: `count` floats in scratch memory, zero up to a whole vector.
template <class T>
void store_copy_row(const float* row, int64_t count, T* copy, float* scale) {
  const D d;
  if constexpr (sizeof(T) == 1) {
    *scale = row_scale<T>(row, count);
    if (*scale == 0) {
      std::memset(copy, 0, static_cast<size_t>(count));
      return;
    }
    const Divider divide(*scale);
    ForVectors(d, static_cast<size_t>(count),
               [&](size_t i, auto n) { StoreF32N(divide(hn::Load(d, row + i)), d, copy + i, n); });
  } else {
    ForVectors(d, static_cast<size_t>(count),
               [&](size_t i, auto n) { StoreF32N(hn::Load(d, row + i), d, copy + i, n); });
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
    for (int64_t r = 0; r < count; ++r) write_row(row + r, rows + r * stride);
  }

 private:
  bool rounds_stochastically() const {
    return p_.rounding.seed != nullptr && p_.state.checkpoint_dtype != DType::kFloat32;
  }

  void write_row(int64_t row, const float* values) const {
    const int64_t size = p_.shape.state_dim;
    const int64_t of_slot = head_ * p_.shape.head_dim + row;
    const int64_t at = target_ * p_.shape.heads * p_.shape.head_dim + of_slot;
    dispatch_float(p_.state.checkpoint_dtype, [&]<class StateT>() {
      StateT* to = static_cast<StateT*>(p_.state.checkpoint) + at * size;
      if constexpr (sizeof(StateT) == 2) {
        if (rounds_stochastically()) {
          const RowBits random(p_.rounding.seed[slot_], counter_, p_.rounding.stream, of_slot,
                               size);
          return store_stochastic(values, size, random, to);
        }
      }
      ForVectors(D(), static_cast<size_t>(size),
                 [&](size_t i, auto n) { StoreF32N(hn::Load(D(), values + i), D(), to + i, n); });
    });
    const ReadCopy& copy = p_.state.read_copy;
    if (copy.data == nullptr) return;
    dispatch_storage(copy.dtype, [&]<class CopyT>() {
      float* const scale = sizeof(CopyT) == 1 ? copy.scale + at : nullptr;
      store_copy_row(values, size, static_cast<CopyT*>(copy.data) + at * size, scale);
    });
  }

  const RecurrentStepParams& p_;
  int64_t slot_, target_, head_, counter_;
};

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
