// One value head's state streamed through registers, row by row, compiled once per instruction set
// (included after foreach_target.h).
#if defined(REPLAYSSM_OPS_CPU_RECURRENT_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_RECURRENT_STREAM_INL_H_
#undef REPLAYSSM_OPS_CPU_RECURRENT_STREAM_INL_H_
#else
#define REPLAYSSM_OPS_CPU_RECURRENT_STREAM_INL_H_
#endif

#include <algorithm>

#include "ops/cpu/recurrent-inl.h"
#include "ops/cpu/recurrent_prefetch.h"
#include "ops/cpu/state_writer-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

// s <- the recurrence's next state for kRows rows that share k. Decay: a float, or a float per
// column. v: as gather_value leaves it.
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
    for (size_t r = 0; r < kRows; ++r) write[r] = hn::Set(d, v[r]);
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
//   kChain: several tokens, while which the feed fetches.
// `writer` stores rows; without one they go back to where they came from.
template <Family kFamily, bool kReplayAll, bool kChain, size_t kVecs, size_t kRows, class StateT>
HWY_INLINE void stream_rows(const Replay& replay, const StepScratch& m, const HeadScratch& head,
                            const RowWidth<kVecs>& width, int64_t state_dim, StateT* state,
                            int64_t row, const HeadWriter* writer, LineFeed& feed) {
  StateT* const rows = state + row * state_dim;
  Row<kVecs> s[kRows];
  for (size_t r = 0; r < kRows; ++r) load_row(rows + r * state_dim, width, s[r]);
  feed.reading<kChain>(rows, kRows * state_dim * static_cast<int64_t>(sizeof(StateT)));
  const int64_t first = replay.first_of_window();
  const int64_t replayed = kReplayAll ? replay.rows : replay.replayed;
  const auto take = [&](int64_t j) {
    update_rows<kFamily, kVecs, kRows>(decays<kFamily>(m, head, j), head.b[j],
                                       head.v + j * m.height + row, m.k + j * m.width, width, s);
    if (kReplayAll && j >= first) {
      float* o = head.o + (j - first) * m.height + row;
      std::fill_n(o, kRows, 0.0f);
      add_lanes<kRows>(dots<kVecs, kRows>(s, m.q + (j - first) * m.width, width), o);
    }
  };
  const auto store = [&]() {
    if (replay.stored == 0) return;
    for (size_t r = 0; r < kRows; ++r) {
      if (writer != nullptr) {
        store_vectors(s[r], width, m.fresh + r * m.width);
      } else {
        store_row(s[r], width, rows + r * state_dim);
      }
    }
  };
  if constexpr (kChain) {
    const auto run = [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        feed.token<is_delta(kFamily)>();
        take(j);
      }
    };
    run(0, replay.stored);
    store();
    run(replay.stored, replayed);
  } else {
    if (replayed > 0) take(0);
    store();
  }
  if constexpr (!kReplayAll) {
    for (int64_t i = 0; i < replay.window; ++i) {
      add_lanes<kRows>(dots<kVecs, kRows>(s, head.t + i * m.width, width),
                       head.o + i * m.height + row);
    }
  }
  if (writer != nullptr && replay.stored > 0) writer->write(row, kRows, m.fresh, m.width);
}

template <Family kFamily, bool kReplayAll, bool kChain, size_t kVecs, int64_t kRows, class StateT>
void stream_by(const Replay& replay, const StepScratch& m, const HeadScratch& head,
               const RecurrentShape& shape, StateT* state, const HeadWriter* writer,
               Prefetcher& prefetcher) {
  const RowWidth<kVecs> width(shape.state_dim);
  LineFeed feed(prefetcher);
  int64_t row = 0;
  for (; row + kRows <= shape.head_dim; row += kRows)
    stream_rows<kFamily, kReplayAll, kChain, kVecs, kRows>(replay, m, head, width, shape.state_dim,
                                                           state, row, writer, feed);
  for (; row < shape.head_dim; ++row)
    stream_rows<kFamily, kReplayAll, kChain, kVecs, 1>(replay, m, head, width, shape.state_dim,
                                                       state, row, writer, feed);
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
    stream_by<kFamily, kReplayAll, true, kVecs, kChainRows>(replay, m, head, shape, state, writer,
                                                            prefetcher);
  } else {
    stream_by<kFamily, kReplayAll, false, kVecs, kTokenRows>(replay, m, head, shape, state, writer,
                                                             prefetcher);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
