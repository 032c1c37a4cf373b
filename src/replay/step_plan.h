// What the layers of a step ask of a sequence, and in which order they take a batch's sequences:
// those that fold last longest, so none of them may come last.
#pragma once

#include "replay/cursor.h"

namespace replayssm {

// Of a cursor as the begin of the step left it; no padding.
constexpr SequencePlan plan_sequence(int32_t sequence, int32_t slot, int32_t token, int32_t window,
                                     const Cursor& cursor, const RingConfig& ring) {
  const auto rows = static_cast<uint64_t>(ring_rows(ring.buffer_len, ring.max_window));
  const auto inputs = static_cast<uint64_t>(conv_rows(ring.conv_kernel, ring.max_window));
  return {
      .sequence = sequence,
      .slot = slot,
      .token = token,
      .window = window,
      .ring_first = static_cast<int32_t>(uint64_t(cursor.ring_start - cursor.fold_count) % rows),
      .history = cursor.fold_count + cursor.ring_count,
      .folded = cursor.fold_count,
      .conv_first = static_cast<int32_t>(uint64_t(cursor.ring_start + cursor.ring_count) % inputs)};
}

// Where a sequence of `count` goes of which `folds` fold; rank: among those that fold like it. The
// folds are spread evenly over the first half.
constexpr int32_t planned_place(bool fold, int32_t rank, int32_t folds, int32_t count) {
  const int32_t span = std::max(count / 2, folds);
  if (fold) return static_cast<int32_t>(int64_t{rank} * span / folds);
  const int32_t others = span - folds;  // that lie between folds
  if (rank >= others) return rank + folds;
  return rank + static_cast<int32_t>((int64_t{rank + 1} * folds + others - 1) / others);
}

}  // namespace replayssm
