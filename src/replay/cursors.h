// The cursors of whole batches, on the host. Arithmetic: replay/cursor.h. A slot of -1 is padding.
#pragma once

#include <cstdint>

#include "replay/cursor.h"

namespace replayssm {

// Calls fn(cursor, s) for the sequences that are no padding.
template <class Fn>
void for_cursors(int64_t sequences, const int32_t* slot, Cursor* cursors, Fn&& fn) {
  for (int64_t s = 0; s < sequences; ++s) {
    if (slot[s] >= 0) fn(cursors[slot[s]], s);
  }
}

// Empty sequences move in.
inline void reset_slots(int64_t sequences, const int32_t* slot, const RingConfig& ring,
                        Cursor* cursors) {
  for_cursors(sequences, slot, cursors, [&](Cursor& c, int64_t) { c = reset_cursor(ring); });
}

// Before the layers of a step. query_start: [sequences + 1].
inline void begin_steps(int64_t sequences, const int32_t* slot, const int32_t* query_start,
                        const RingConfig& ring, Cursor* cursors) {
  for_cursors(sequences, slot, cursors, [&](Cursor& c, int64_t s) {
    begin_step(c, query_start[s + 1] - query_start[s], ring);
  });
}

// After the layers. accepted: [sequences], of each window.
inline void commit_steps(int64_t sequences, const int32_t* slot, const int32_t* accepted,
                         Route route, Cursor* cursors) {
  for_cursors(sequences, slot, cursors,
              [&](Cursor& c, int64_t s) { commit_step(c, accepted[s], route); });
}

// After a prefill of the windows of query_start.
inline void commit_prefills(int64_t sequences, const int32_t* slot, const int32_t* query_start,
                            const RingConfig& ring, Cursor* cursors) {
  for_cursors(sequences, slot, cursors, [&](Cursor& c, int64_t s) {
    commit_prefill(c, query_start[s + 1] - query_start[s], ring);
  });
}

// After a fold of the slots: in place, or into target_slot, whose cursors become those of the
// folded sources while the sources' stay.
inline void commit_folds(int64_t sequences, const int32_t* slot, const int32_t* target_slot,
                         Cursor* cursors) {
  for_cursors(sequences, slot, cursors, [&](Cursor& c, int64_t s) {
    if (target_slot == nullptr) return commit_fold(c);
    if (target_slot[s] < 0) return;
    cursors[target_slot[s]] = c;
    commit_fold(cursors[target_slot[s]]);
  });
}

// After a copy of the slots.
inline void copy_cursors(int64_t sequences, const int32_t* slot, const int32_t* target_slot,
                         Cursor* cursors) {
  for_cursors(sequences, slot, cursors, [&](const Cursor& c, int64_t s) {
    if (target_slot[s] >= 0) cursors[target_slot[s]] = c;
  });
}

}  // namespace replayssm
