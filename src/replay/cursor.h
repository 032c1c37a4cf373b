// The ring cursor of a sequence slot: the only place where its arithmetic is written for the host.
//
// A slot's state is the checkpoint plus the ring rows [ring_start, ring_start + ring_count). Token
// counters grow since the reset and never wrap; a row's place in memory is the counter modulo the
// number of physical rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "replayssm/ops.h"

namespace replayssm {

// Physical rows of a ring whose history is at most `buffer_len` and whose window at most
// `max_window`. Nobody overwrites a row that a fold of the same step still reads.
constexpr int64_t ring_rows(int64_t buffer_len, int64_t max_window) {
  return std::max(buffer_len, max_window) + max_window;
}

// Physical rows of the convolution's inputs: what precedes a window, and the window.
constexpr int64_t conv_rows(int64_t conv_kernel, int64_t max_window) {
  return conv_kernel - 1 + max_window;
}

// An empty slot. The counter starts behind the zeroed inputs that precede the first token.
constexpr Cursor reset_cursor(const RingConfig& ring) {
  return {.ring_start = ring.conv_kernel - 1,
          .ring_count = 0,
          .ring_limit = ring.buffer_len,
          .fold_count = 0};
}

// Tokens committed since the reset.
constexpr int64_t committed_tokens(const Cursor& cursor, const RingConfig& ring) {
  return cursor.ring_start + cursor.ring_count - (ring.conv_kernel - 1);
}

// Before the layers of a step with `window` new tokens: decides the fold. The folded rows are
// [ring_start - fold_count, ring_start) of the result. Nothing happens for an empty window.
constexpr void begin_step(Cursor& cursor, int64_t window, const RingConfig& ring) {
  cursor.fold_count = 0;
  if (window == 0 || cursor.ring_count + window <= cursor.ring_limit) return;
  cursor.fold_count = cursor.ring_count;
  cursor.ring_start += cursor.ring_count;
  cursor.ring_count = 0;
  cursor.ring_limit = ring.buffer_len;
}

// After the layers: the first `accepted` rows of the window join the ring, or, where the step has
// stored the state itself (conventional), are already in the checkpoint.
constexpr void commit_step(Cursor& cursor, int64_t accepted, Route route) {
  cursor.fold_count = 0;
  if (route == Route::kConventional) {
    cursor.ring_start += accepted;
  } else {
    cursor.ring_count += static_cast<int32_t>(accepted);
  }
}

// After a prefill of `tokens` tokens on an empty ring. Flushes then fall on multiples of buffer_len
// of the sequence position: the phase belongs to the request, not to its slot.
constexpr void commit_prefill(Cursor& cursor, int64_t tokens, const RingConfig& ring) {
  cursor.ring_start += tokens;
  cursor.ring_limit =
      ring.buffer_len - static_cast<int32_t>(committed_tokens(cursor, ring) % ring.buffer_len);
}

// After all rows have been folded outside a step (a prefill that follows, a snapshot).
constexpr void commit_fold(Cursor& cursor) {
  cursor.ring_start += cursor.ring_count;
  cursor.ring_count = 0;
}

}  // namespace replayssm
