// Queries walked back through the rows that are not in the state, compiled once per instruction set
// (included after foreach_target.h).
#if defined(REPLAYSSM_OPS_CPU_RECURRENT_WALK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_RECURRENT_WALK_INL_H_
#undef REPLAYSSM_OPS_CPU_RECURRENT_WALK_INL_H_
#else
#define REPLAYSSM_OPS_CPU_RECURRENT_WALK_INL_H_
#endif

#include <algorithm>

#include "ops/cpu/recurrent-inl.h"
#include "ops/cpu/recurrent_prefetch.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

// k . q for every row that the walk of a window row visits.
inline void multiply_keys(const Replay& replay, const StepScratch& m) {
  for (int64_t i = 0; i < replay.window; ++i) {
    for (int64_t j = replay.first_of_window() + i; j >= replay.replayed; j = replay.before(j))
      m.kq[i * m.rows + j] = hn::GetLane(dot_memory(m.k + j * m.width, m.q + i * m.width, m.width));
  }
}

inline void walk_scalar(const Replay& replay, const StepScratch& m, const HeadScratch& head,
                        int64_t i) {
  const D d;
  float decay = 1;
  for (int64_t j = replay.first_of_window() + i; j >= replay.replayed; j = replay.before(j)) {
    head.c[i * m.rows + j] = head.b[j] * (decay * m.kq[i * m.rows + j]);
    decay *= head.a[j];
  }
  for (int64_t x = 0; x < m.width; x += kLanes)
    hn::Store(hn::Mul(hn::Set(d, decay), hn::Load(d, m.q + i * m.width + x)), d,
              head.t + i * m.width + x);
}

// t <- a (t - b (k . t) k); returns b (k . t).
template <Family kFamily>
HWY_INLINE float walk_row(const StepScratch& m, const HeadScratch& head, int64_t j, float* t) {
  const D d;
  const float* k = m.k + j * m.width;
  const auto c = hn::Mul(hn::Set(d, head.b[j]), dot_memory(t, k, m.width));
  const auto decay = decays<kFamily>(m, head, j);
  for (int64_t x = 0; x < m.width; x += kLanes) {
    const auto rest = hn::NegMulAdd(c, hn::Load(d, k + x), hn::Load(d, t + x));
    hn::Store(hn::Mul(load_decay(decay, x), rest), d, t + x);
  }
  return hn::GetLane(c);
}

// Leaves t and the coefficient c of every row on the way. All queries of all heads are walked
// together, a row of each in turn: their chains hide each other's latencies.
template <Family kFamily>
void walk_back(const Replay& replay, const StepScratch& m, int64_t heads, Prefetcher& prefetcher) {
  if constexpr (kFamily == Family::kMamba2) {
    multiply_keys(replay, m);
    for (int64_t i = 0; i < replay.window; ++i) {
      for (int64_t h = 0; h < heads; ++h) walk_scalar(replay, m, m.heads[h], i);
    }
    return;
  }
  for (int64_t i = 0; i < replay.window; ++i) {
    m.row[i] = replay.first_of_window() + i;
    for (int64_t h = 0; h < heads; ++h)
      std::copy_n(m.q + i * m.width, m.width, m.heads[h].t + i * m.width);
  }
  for (bool walking = true; walking;) {
    walking = false;
    for (int64_t i = 0; i < replay.window; ++i) {
      const int64_t j = m.row[i];
      if (j < replay.replayed) continue;
      walking = true;
      if (j % 2 == 0) prefetcher.computing();
      for (int64_t h = 0; h < heads; ++h) {
        const HeadScratch& head = m.heads[h];
        head.c[i * m.rows + j] = walk_row<kFamily>(m, head, j, head.t + i * m.width);
      }
      m.row[i] = replay.before(j);
    }
  }
}

// Vectors [i, i + kVecs) of y = sum_j weight_j x_j; `n` is what LoadF32N takes of the last one.
template <size_t kVecs, class T, class N>
HWY_INLINE void weighted_sum_at(size_t i, N n, int64_t count, const float* weight,
                                const void* const* x, float* y) {
  const D d;
  V sum[kVecs];
  for (size_t v = 0; v < kVecs; ++v) sum[v] = hn::Zero(d);
  for (int64_t j = 0; j < count; ++j) {
    const auto factor = hn::Set(d, weight[j]);
    const T* row = static_cast<const T*>(x[j]) + i;
    for (size_t v = 0; v < kVecs; ++v)
      sum[v] = hn::MulAdd(factor, LoadF32N(d, row + v * kLanes, n), sum[v]);
  }
  for (size_t v = 0; v < kVecs; ++v) hn::Store(sum[v], d, y + i + v * kLanes);
}

// y = sum_j weight_j x_j over rows of `size` elements; writes up to padded(size) floats. Vectors
// are taken together: the loop over few rows is left as seldom as may be.
template <class T>
void weighted_sum(int64_t count, const float* weight, const void* const* x, int64_t size,
                  float* y) {
  using replayssm::HWY_NAMESPACE::WholeVector;
  size_t i = 0;
  const auto take = [&]<size_t kVecs>() {
    for (; i + kVecs * kLanes <= static_cast<size_t>(size); i += kVecs * kLanes)
      weighted_sum_at<kVecs, T>(i, WholeVector(), count, weight, x, y);
  };
  take.template operator()<8>();
  take.template operator()<5>();
  take.template operator()<4>();
  ForVectors(D(), static_cast<size_t>(size) - i,
             [&](size_t rest, auto n) { weighted_sum_at<1, T>(i + rest, n, count, weight, x, y); });
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
