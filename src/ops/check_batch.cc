// Checks of what lies behind the pointers of a batch.

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "core/check.h"
#include "ops/check_params.h"
#include "replay/cursor.h"

namespace replayssm {
namespace {

std::string at(const char* name, int64_t i) { return concat(name, "[", i, "]"); }

void check_slot_range(const char* name, const int32_t* slot, int64_t count, int64_t slots) {
  for (int64_t s = 0; s < count; ++s) {
    if (slot[s] < -1 || slot[s] >= slots) {
      fail(at(name, s), ": expected -1 or a slot below ", slots, ", got ", slot[s]);
    }
  }
}

// Finds the first slot that two sequences share. Padding may repeat.
void check_no_slot_twice(const char* name, const int32_t* slot, int64_t count) {
  std::vector<std::pair<int32_t, int64_t>> order;
  for (int64_t s = 0; s < count; ++s) {
    if (slot[s] >= 0) order.emplace_back(slot[s], s);
  }
  std::ranges::sort(order);
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i].first != order[i - 1].first) continue;
    fail(at(name, order[i].second), ": expected a slot of its own, got slot ", order[i].first,
         ", which ", at(name, order[i - 1].second), " has");
  }
}

void check_cursor(const SequenceBatch& batch, int64_t s, WindowUse use) {
  const int32_t slot = batch.slot[s];
  const Cursor& c = batch.cursors[slot];
  const RingConfig& ring = batch.ring;
  const std::string name = at("batch.cursors", slot);
  const int64_t most = std::max(ring.buffer_len, ring.max_window);
  const auto expect_range = [&](const char* field, int64_t least, int64_t highest, int64_t value) {
    if (value >= least && value <= highest) return;
    fail(name, ".", field, ": expected ", least, " to ", highest, ", got ", value);
  };
  expect_range("fold_count", 0, most, c.fold_count);
  expect_range("ring_count", 0, most - c.fold_count, c.ring_count);
  expect_range("ring_limit", 0, ring.buffer_len, c.ring_limit);
  if (c.ring_start < ring.conv_kernel - 1 + c.fold_count) {
    fail(name, ".ring_start: expected at least ", ring.conv_kernel - 1 + c.fold_count, ", got ",
         c.ring_start);
  }
  if (use == WindowUse::kPrompt && c.ring_count + c.fold_count > 0) {
    fail(name, ".ring_count: expected an empty ring, got ", c.ring_count + c.fold_count, " rows");
  }
  if (use != WindowUse::kDecode) return;
  const int64_t window = batch.query_start[s + 1] - batch.query_start[s];
  if (c.ring_count > 0 && window > 0 && c.ring_count + window > c.ring_limit) {
    fail(name,
         ".ring_count: expected a step that has begun, with at most ring_limit = ", c.ring_limit,
         " rows and tokens, got ", c.ring_count, " and ", window);
  }
}

}  // namespace

void check_windows(const SequenceBatch& batch, WindowUse use) {
  if (use == WindowUse::kNone || batch.sequences == 0) return;
  const int32_t* start = batch.query_start;
  if (start[0] < 0) fail("batch.query_start[0]: expected at least 0, got ", start[0]);
  for (int64_t s = 0; s < batch.sequences; ++s) {
    if (start[s + 1] < start[s]) {
      fail(at("batch.query_start", s + 1), ": expected at least the ", start[s], " before it, got ",
           start[s + 1]);
    }
    const int64_t window = int64_t{start[s + 1]} - start[s];
    if (use == WindowUse::kDecode && window > batch.ring.max_window) {
      fail(at("batch.query_start", s + 1),
           ": expected a window of at most max_window = ", batch.ring.max_window, " tokens, got ",
           window);
    }
    for (int64_t i = 0; batch.parent != nullptr && i < window; ++i) {
      const int32_t parent = batch.parent[start[s] + i];
      if (parent >= -1 && parent < i) continue;
      fail(at("batch.parent", start[s] + i), ": expected -1 or a token before token ", i,
           " of its window, got ", parent);
    }
  }
}

void check_batch(const SequenceBatch& batch, int64_t slots, WindowUse use) {
  check_slot_range("batch.slot", batch.slot, batch.sequences, slots);
  check_no_slot_twice("batch.slot", batch.slot, batch.sequences);
  check_windows(batch, use);
  for (int64_t s = 0; batch.cursors != nullptr && s < batch.sequences; ++s) {
    if (batch.slot[s] >= 0) check_cursor(batch, s, use);
  }
}

void debug_check(const SequenceBatch& batch, WindowUse use) {
  if constexpr (REPLAYSSM_DEBUG_CHECKS != 0) {
    check_batch(batch, std::numeric_limits<int32_t>::max(), use);
  }
}

void check_targets(const SequenceBatch& batch, const int32_t* target_slot, int64_t slots) {
  check_slot_range("target_slot", target_slot, batch.sequences, slots);
  check_no_slot_twice("target_slot", target_slot, batch.sequences);
  for (int64_t s = 0; s < batch.sequences; ++s) {
    if (target_slot[s] < 0) continue;
    const int32_t* end = batch.slot + batch.sequences;
    const int32_t* source = std::find(batch.slot, end, target_slot[s]);
    if (source != end) {
      fail(at("target_slot", s), ": expected a slot that is no source, got slot ", target_slot[s],
           ", which is ", at("batch.slot", source - batch.slot));
    }
  }
}

void check_path(const SequenceBatch& batch, const int32_t* path, const int32_t* accepted) {
  for (int64_t s = 0; s < batch.sequences; ++s) {
    if (batch.slot[s] < 0) continue;
    const int64_t first = batch.query_start[s], window = batch.query_start[s + 1] - first;
    if (accepted[s] < 0 || accepted[s] > window) {
      fail(at("accepted", s), ": expected 0 to the window's ", window, " tokens, got ",
           accepted[s]);
    }
    int64_t before = -1;
    for (int64_t i = 0; i < accepted[s]; ++i) {
      const int64_t row = path[first + i];
      if (row <= before || row >= window) {
        fail(at("path", first + i), ": expected ", before + 1, " to ", window - 1, ", got ", row);
      }
      before = row;
    }
  }
}

}  // namespace replayssm
