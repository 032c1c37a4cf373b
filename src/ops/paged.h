// What the paged decode steps of every backend share: their cursor rules and gates, written once
// for host and device (contracts: replayssm/paged.h).
#pragma once

#include <cstdint>

#include "replayssm/paged.h"

namespace replayssm {

using PagedStep = replayssm_paged_step;
using PagedCursors = replayssm_paged_cursors;
using PagedValues = replayssm_values;
using PagedIntegers = replayssm_integers;

// Above it softplus(x) is x.
inline constexpr float kSoftplusThreshold = 20.0f;

// Most tokens of a window, and rows of a cache.
inline constexpr int64_t kMaxPagedWindow = 32, kMaxPagedRing = 256;

constexpr int64_t integer_at(const PagedIntegers& x, int64_t i) {
  const int64_t at = i * x.stride;
  if (x.bytes == 1) return static_cast<const int8_t*>(x.data)[at];
  if (x.bytes == 4) return static_cast<const int32_t*>(x.data)[at];
  return static_cast<const int64_t*>(x.data)[at];
}

constexpr bool is_paged_padding(int64_t slot, int64_t null_slot, replayssm_family family) {
  return slot < 0 || slot == null_slot || (family != REPLAYSSM_MAMBA2 && slot < null_slot);
}

// Where a row of the batch stands.
struct PagedRow {
  int64_t slot = -1;  // -1: padding, or not of this call's part
  int64_t token = 0;  // its first
  int window = 0;     // tokens
  int origin = 0;     // place of the oldest cached row
  int history = 0;    // rows cached, fewer than the ring has
  bool flushes = false;

  // The place of row j in a ring of `ring` rows; rows of single steps do not wrap.
  constexpr int place(int j, int64_t ring, bool wraps) const {
    return wraps ? (origin + j) & static_cast<int>(ring - 1) : j;
  }
};

// What the batch says of a row: its slot, -1 for padding; its first token and the next row's; its
// cursors.
struct PagedRowIntegers {
  int64_t slot = -1, token = 0, end = 1, write_pos = 0, origin = 0, is_flush = 0;
};

constexpr int64_t paged_slot(const PagedStep& p, int64_t slot) {
  return is_paged_padding(slot, p.null_slot, p.family) ? -1 : slot;
}

constexpr PagedRow paged_row(const PagedStep& p, const PagedRowIntegers& x) {
  PagedRow row;
  row.token = x.token;
  row.window = static_cast<int>(x.end - x.token);
  const bool flushes_only = p.part == REPLAYSSM_PAGED_FLUSHES;
  if (x.slot < 0) {
    if (flushes_only) row.window = 0;
    return row;
  }
  row.slot = x.slot;
  const auto cached = static_cast<int>(x.write_pos);
  row.history = cached < 0 ? 0 : cached < p.ring ? cached : static_cast<int>(p.ring) - 1;
  row.origin = static_cast<int>(x.origin);
  row.flushes = p.is_flush.data ? x.is_flush != 0 : row.history == p.ring - 1;
  if (p.part != REPLAYSSM_PAGED_ALL && flushes_only != row.flushes) row.slot = -1, row.window = 0;
  return row;
}

constexpr PagedRow paged_row(const PagedStep& p, int64_t s) {
  PagedRowIntegers x;
  x.slot = p.slot.data ? paged_slot(p, integer_at(p.slot, s)) : s;
  x.token = p.query_start.data ? integer_at(p.query_start, s) : s;
  x.end = p.query_start.data ? integer_at(p.query_start, s + 1) : s + 1;
  if (x.slot < 0) return paged_row(p, x);
  const int64_t key = p.rule == REPLAYSSM_PAGED_WINDOW ? x.slot : s;
  x.write_pos = integer_at(p.write_pos, key);
  if (p.origin.data) x.origin = integer_at(p.origin, key);
  if (p.is_flush.data) x.is_flush = integer_at(p.is_flush, key);
  return paged_row(p, x);
}

// A slot's cursors after `accepted` tokens of its window. A row that flushed has no history left,
// whatever was accepted.
constexpr void paged_commit(const PagedCursors& p, int64_t slot, int64_t accepted) {
  int32_t& write_pos = p.write_pos[slot * p.write_pos_stride];
  int32_t& origin = p.origin[slot * p.origin_stride];
  int8_t& is_flush = p.is_flush[slot * p.is_flush_stride];
  const int32_t kept = accepted > 0 ? static_cast<int32_t>(accepted) : 0;
  if (is_flush != 0) {
    origin = (origin + write_pos) & (p.ring - 1);
    write_pos = kept;
  } else {
    write_pos += kept;
  }
  is_flush = write_pos + 2 * p.max_window > p.threshold;
}

constexpr void paged_reset(const PagedCursors& p, int64_t slot) {
  p.write_pos[slot * p.write_pos_stride] = 0;
  p.origin[slot * p.origin_stride] = 0;
  p.is_flush[slot * p.is_flush_stride] = 2 * p.max_window > p.threshold;
}

}  // namespace replayssm
