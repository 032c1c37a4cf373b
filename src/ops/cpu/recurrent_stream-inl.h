// One value head's state streamed through registers, row by row, compiled once per instruction set
// (included after foreach_target.h).
#if defined(REPLAYSSM_OPS_CPU_RECURRENT_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_RECURRENT_STREAM_INL_H_
#undef REPLAYSSM_OPS_CPU_RECURRENT_STREAM_INL_H_
#else
#define REPLAYSSM_OPS_CPU_RECURRENT_STREAM_INL_H_
#endif

#include <algorithm>
#include <utility>

#include "ops/cpu/recurrent-inl.h"
#include "ops/cpu/recurrent_prefetch.h"
#include "ops/cpu/state_writer-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

// s <- the recurrence's next state for kRows rows that share k. Decay: a float, or a float per
// column.
template <Family kFamily, size_t kVecs, size_t kRows, class Decay>
HWY_INLINE void update_rows(Decay a, float b, const float* v, const float* k,
                            const RowWidth<kVecs>& width, Row<kVecs>* s) {
  const D d;
  if constexpr (kFamily == Family::kKimiDelta) {
    for (size_t i = 0; i < width.vecs(); ++i) {
      for (size_t r = 0; r < kRows; ++r) s[r].v[i] = hn::Mul(load_decay(a, i * kLanes), s[r].v[i]);
    }
  }
  V write[kRows];
  if constexpr (is_delta(kFamily)) {
    auto known = dots<kVecs, kRows>(s, k, width);
    if constexpr (kFamily == Family::kGatedDelta) known = hn::Mul(load_decay(a, 0), known);
    spread_lanes<kRows>(hn::Mul(hn::Set(d, b), hn::Sub(load_lanes<kRows>(v), known)), write);
  } else {
    for (size_t r = 0; r < kRows; ++r) write[r] = hn::Mul(hn::Set(d, b), hn::Set(d, v[r]));
  }
  for (size_t i = 0; i < width.vecs(); ++i) {
    const auto key = hn::Load(d, k + i * kLanes);
    for (size_t r = 0; r < kRows; ++r) {
      auto kept = s[r].v[i];
      if constexpr (kFamily != Family::kKimiDelta) kept = hn::Mul(load_decay(a, 0), kept);
      s[r].v[i] = hn::MulAdd(write[r], key, kept);
    }
  }
}

// Replays rows in registers and stores the state after `stored` of them.
//   kReplayAll (conventional, state_and_output): all rows, and the window's outputs are read off
//   them. Otherwise (output_only, trees): the first `replayed`, then S t is added to every output
//   of the window.
// `writer` stores rows; without one they go back to where they came from.
template <Family kFamily, bool kReplayAll, size_t kVecs, size_t kRows, class StateT>
HWY_INLINE void stream_rows(const Replay& replay, const StepScratch& m, const HeadScratch& head,
                            const RowWidth<kVecs>& width, int64_t state_dim, StateT* state,
                            int64_t row, const HeadWriter* writer, Prefetcher& prefetcher) {
  Row<kVecs> s[kRows];
  for (size_t r = 0; r < kRows; ++r) load_row(state + (row + r) * state_dim, width, s[r]);
  prefetcher.reading(state + row * state_dim, kRows * state_dim * sizeof(StateT));
  const int64_t first = replay.first_of_window();
  const int64_t replayed = kReplayAll ? replay.rows : replay.replayed;
  for (int64_t j = 0; j < replayed; ++j) {
    if (j % 4 == 3) prefetcher.computing();
    update_rows<kFamily, kVecs, kRows>(decays<kFamily>(m, head, j), head.b[j],
                                       head.v + j * m.height + row, m.k + j * m.width, width, s);
    if (kReplayAll && j >= first) {
      float* o = head.o + (j - first) * m.height + row;
      std::fill_n(o, kRows, 0.0f);
      add_lanes<kRows>(dots<kVecs, kRows>(s, m.q + (j - first) * m.width, width), o);
    }
    if (j + 1 == replay.stored) {
      if (writer != nullptr) {
        for (size_t r = 0; r < kRows; ++r) store_vectors(s[r], width, m.fresh + r * m.width);
      } else {
        for (size_t r = 0; r < kRows; ++r) store_row(s[r], width, state + (row + r) * state_dim);
      }
    }
  }
  if constexpr (!kReplayAll) {
    for (int64_t i = 0; i < replay.window; ++i) {
      add_lanes<kRows>(dots<kVecs, kRows>(s, head.t + i * m.width, width),
                       head.o + i * m.height + row);
    }
  }
  if (writer != nullptr && replay.stored > 0) writer->write(row, kRows, m.fresh, m.width);
}

// The effect of a token on a vector of a row, whose decays per column have been applied.
template <Family kFamily, class Decay>
HWY_INLINE V apply_token(V write, V key, Decay a, V x) {
  if constexpr (kFamily != Family::kKimiDelta) x = hn::Mul(load_decay(a, 0), x);
  return hn::MulAdd(write, key, x);
}

// Calls fn.operator()<i>() for i = 0 .. kCount - 1: arrays of vectors that are indexed by it stay
// in registers.
template <size_t kCount, class Fn>
HWY_INLINE void unrolled(Fn&& fn) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    (fn.template operator()<i>(), ...);
  }(std::make_index_sequence<kCount>());
}

// Of kDotRows rows in scratch memory: applies the token before (not if kFirst), then the decays per
// column of the next, and returns the products with its key as `dots` does.
template <Family kFamily, size_t kVecs, bool kFirst, class Decay>
HWY_INLINE V advance_rows(const V (&write)[kDotRows], const float* key_before, Decay a_before,
                          const float* key, Decay a, int64_t stride, float* rows) {
  const D d;
  V even[kDotRows], odd[kDotRows];
  unrolled<kDotRows>([&]<size_t r>() { even[r] = odd[r] = hn::Zero(d); });
  const auto take = [&](size_t i, V(&sum)[kDotRows]) {
    const auto at = static_cast<int64_t>(i * kLanes);
    const auto k = hn::Load(d, key + at), before = hn::Load(d, key_before + at);
    unrolled<kDotRows>([&]<size_t r>() {
      float* const to = rows + static_cast<int64_t>(r) * stride + at;
      auto x = hn::Load(d, to);
      if constexpr (!kFirst) x = apply_token<kFamily>(write[r], before, a_before, x);
      if constexpr (kFamily == Family::kKimiDelta) x = hn::Mul(load_decay(a, at), x);
      hn::Store(x, d, to);
      sum[r] = hn::MulAdd(x, k, sum[r]);
    });
  };
  for (size_t i = 0; i + 1 < kVecs; i += 2) {
    take(i, even);
    take(i + 1, odd);
  }
  if constexpr (kVecs % 2 == 1) take(kVecs - 1, even);
  unrolled<kDotRows>([&]<size_t r>() { even[r] = hn::Add(even[r], odd[r]); });
  return sums_of_lanes(even[0], even[1 % kDotRows], even[2 % kDotRows], even[3 % kDotRows]);
}

// Folds a chain of a delta rule's tokens into kFoldRows rows in scratch memory. Groups of kDotRows
// rows take turns, so that their chains of dependent sums hide each other's latencies.
inline constexpr int64_t kFoldRows = kMostRows, kFoldGroups = kFoldRows / kDotRows;

template <Family kFamily, size_t kVecs>
HWY_INLINE void fold_rows(const Replay& replay, const StepScratch& m, const HeadScratch& head,
                          int64_t row, float* rows, Prefetcher& prefetcher) {
  const D d;
  V write[kFoldGroups][kDotRows];
  const auto fold_token = [&]<bool kFirst>(int64_t j) {
    const int64_t before = kFirst ? j : j - 1;
    const auto a = decays<kFamily>(m, head, j), a_before = decays<kFamily>(m, head, before);
    const auto b = hn::Set(d, head.b[j]);
    const float* v = head.v + j * m.height + row;
    unrolled<kFoldGroups>([&]<size_t g>() {
      constexpr auto kRow = static_cast<int64_t>(g) * kDotRows;
      auto known = advance_rows<kFamily, kVecs, kFirst>(write[g], m.k + before * m.width, a_before,
                                                        m.k + j * m.width, a, m.width,
                                                        rows + kRow * m.width);
      if constexpr (kFamily == Family::kGatedDelta) known = hn::Mul(load_decay(a, 0), known);
      spread_lanes<kDotRows>(hn::Mul(b, hn::Sub(load_lanes<kDotRows>(v + kRow), known)), write[g]);
    });
  };
  fold_token.template operator()<true>(0);
  for (int64_t j = 1; j < replay.stored; ++j) {
    if (j % 2 == 1) prefetcher.computing();
    fold_token.template operator()<false>(j);
  }
  const int64_t last = replay.stored - 1;
  const auto a = decays<kFamily>(m, head, last);
  for (size_t i = 0; i < kVecs; ++i) {
    const auto at = static_cast<int64_t>(i * kLanes);
    const auto key = hn::Load(d, m.k + last * m.width + at);
    unrolled<kFoldRows>([&]<size_t r>() {
      float* const to = rows + static_cast<int64_t>(r) * m.width + at;
      hn::Store(apply_token<kFamily>(write[r / kDotRows][r % kDotRows], key, a, hn::Load(d, to)), d,
                to);
    });
  }
}

// Folds all of a head but its last rows; returns how many. Stores them and adds S t to every output
// of the window, as stream_rows does.
template <Family kFamily, size_t kVecs, class StateT>
int64_t fold_head(const Replay& replay, const StepScratch& m, const HeadScratch& head,
                  const RecurrentShape& shape, StateT* state, const HeadWriter* writer,
                  Prefetcher& prefetcher) {
  const RowWidth<kVecs> width(shape.state_dim);
  int64_t row = 0;
  for (; row + kFoldRows <= shape.head_dim; row += kFoldRows) {
    StateT* const from = state + row * shape.state_dim;
    prefetcher.reading(from, kFoldRows * shape.state_dim * sizeof(StateT));
    for (int64_t r = 0; r < kFoldRows; ++r) {
      Row<kVecs> s;
      load_row(from + r * shape.state_dim, width, s);
      store_vectors(s, width, m.fresh + r * m.width);
    }
    fold_rows<kFamily, kVecs>(replay, m, head, row, m.fresh, prefetcher);
    if (writer != nullptr) writer->write(row, kFoldRows, m.fresh, m.width);
    for (int64_t g = 0; g < kFoldRows; g += kDotRows) {
      Row<kVecs> s[kDotRows];
      for (int64_t r = 0; r < kDotRows; ++r) {
        load_row(m.fresh + (g + r) * m.width, width, s[r]);
        if (writer == nullptr) store_row(s[r], width, from + (g + r) * shape.state_dim);
      }
      for (int64_t i = 0; i < replay.window; ++i) {
        add_lanes<kDotRows>(dots<kVecs, kDotRows>(s, head.t + i * m.width, width),
                            head.o + i * m.height + row + g);
      }
    }
  }
  return row;
}

template <Family kFamily, bool kReplayAll, size_t kVecs, int64_t kRows, class StateT>
void stream_by(const Replay& replay, const StepScratch& m, const HeadScratch& head,
               const RecurrentShape& shape, StateT* state, const HeadWriter* writer,
               Prefetcher& prefetcher, int64_t row = 0) {
  const RowWidth<kVecs> width(shape.state_dim);
  for (; row + kRows <= shape.head_dim; row += kRows)
    stream_rows<kFamily, kReplayAll, kVecs, kRows>(replay, m, head, width, shape.state_dim, state,
                                                   row, writer, prefetcher);
  for (; row < shape.head_dim; ++row)
    stream_rows<kFamily, kReplayAll, kVecs, 1>(replay, m, head, width, shape.state_dim, state, row,
                                               writer, prefetcher);
}

template <Family kFamily, bool kReplayAll, size_t kVecs, class StateT>
void stream_state(const Replay& replay, const StepScratch& m, const HeadScratch& head,
                  const RecurrentShape& shape, StateT* state, const HeadWriter* writer,
                  Prefetcher& prefetcher) {
  // Rows taken together hide each other's latencies: for one token as many as stay in registers,
  // for a chain of tokens as many as the first-level cache feeds. Mamba-2's tokens need no product
  // with the row, so that registers are enough.
  constexpr int64_t kRegisters = kLanes >= 16 ? 16 : 8;
  constexpr int64_t kVectors = kVecs > 0 ? kVecs : 2 * kRegisters;
  constexpr int64_t kTokenRows =
      std::clamp<int64_t>(kRegisters / kVectors, 1, std::min<int64_t>(2, kDotRows));
  constexpr int64_t kChainRows =
      is_delta(kFamily) ? std::clamp<int64_t>(2 * kRegisters / kVectors, 1, kDotRows) : kTokenRows;
  if ((kReplayAll ? replay.rows : replay.replayed) > 1) {
    int64_t done = 0;
    if constexpr (!kReplayAll && kVecs > 0 && is_delta(kFamily)) {
      if (replay.stored == replay.replayed)
        done = fold_head<kFamily, kVecs>(replay, m, head, shape, state, writer, prefetcher);
    }
    stream_by<kFamily, kReplayAll, kVecs, kChainRows>(replay, m, head, shape, state, writer,
                                                      prefetcher, done);
  } else {
    stream_by<kFamily, kReplayAll, kVecs, kTokenRows>(replay, m, head, shape, state, writer,
                                                      prefetcher);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
