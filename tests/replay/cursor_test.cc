#include "replay/cursor.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace replayssm {
namespace {

TEST(Cursor, EveryScheduleKeepsItsPromises) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    const RingConfig ring{.buffer_len = 1 + static_cast<int32_t>(random() % 20),
                          .max_window = 1 + static_cast<int32_t>(random() % 24),
                          .conv_kernel = 1 + static_cast<int32_t>(random() % 5)};
    Cursor cursor = reset_cursor(ring);
    int64_t committed = 0;
    if (random() % 2) {
      committed = random() % 100;
      commit_prefill(cursor, committed, ring);
      EXPECT_EQ((committed + cursor.ring_limit) % ring.buffer_len, 0);
    }
    EXPECT_EQ(committed_tokens(cursor, ring), committed);
    for (int step = 0; step < 100; ++step) {
      const int64_t window = random() % (ring.max_window + 1);
      const int64_t before = cursor.ring_start + cursor.ring_count;
      begin_step(cursor, window, ring);
      EXPECT_EQ(cursor.ring_start + cursor.ring_count, before);
      // No row of the step shares its place with another: folded, history and window are distinct.
      const int64_t rows = ring_rows(ring.buffer_len, ring.max_window);
      EXPECT_LE(cursor.fold_count + cursor.ring_count + window, rows);
      EXPECT_TRUE(cursor.fold_count == 0 || cursor.ring_count == 0);
      if (window == 0) {
        EXPECT_EQ(cursor.fold_count, 0);
      }
      const int64_t accepted = random() % (window + 1);
      commit_step(cursor, accepted, Route::kOutputOnly);
      committed += accepted;
      EXPECT_EQ(committed_tokens(cursor, ring), committed);
      EXPECT_LE(cursor.ring_count, std::max(ring.buffer_len, ring.max_window));
      if (random() % 16 == 0) {
        commit_fold(cursor);
        EXPECT_EQ(cursor.ring_count, 0);
        EXPECT_EQ(committed_tokens(cursor, ring), committed);
      }
    }
  }
}

TEST(Cursor, FlushesFallOnMultiplesOfTheBufferLength) {
  for (const int32_t buffer_len : {1, 2, 7, 16}) {
    for (int64_t prompt = 0; prompt < 40; ++prompt) {
      const RingConfig ring{.buffer_len = buffer_len};
      Cursor cursor = reset_cursor(ring);
      commit_prefill(cursor, prompt, ring);
      for (int64_t position = prompt; position < prompt + 50; ++position) {
        begin_step(cursor, 1, ring);
        EXPECT_EQ(cursor.fold_count > 0, position > prompt && position % buffer_len == 0)
            << "buffer_len=" << buffer_len << " prompt=" << prompt << " position=" << position;
        commit_step(cursor, 1, Route::kOutputOnly);
      }
    }
  }
}

TEST(Cursor, ConventionalKeepsAnEmptyRing) {
  const RingConfig ring;
  Cursor cursor = reset_cursor(ring);
  for (int step = 0; step < 50; ++step) {
    begin_step(cursor, 1, ring);
    EXPECT_EQ(cursor.fold_count, 0);
    commit_step(cursor, 1, Route::kConventional);
    EXPECT_EQ(cursor.ring_count, 0);
    EXPECT_EQ(committed_tokens(cursor, ring), step + 1);
  }
}

TEST(Cursor, AcceptingNothingChangesNothing) {
  const RingConfig ring{.buffer_len = 4, .max_window = 3};
  Cursor cursor = reset_cursor(ring);
  begin_step(cursor, 3, ring);
  commit_step(cursor, 2, Route::kOutputOnly);
  Cursor again = cursor;
  begin_step(again, 2, ring);
  commit_step(again, 0, Route::kOutputOnly);
  EXPECT_EQ(again.ring_start, cursor.ring_start);
  EXPECT_EQ(again.ring_count, cursor.ring_count);
  EXPECT_EQ(again.ring_limit, cursor.ring_limit);
}

}  // namespace
}  // namespace replayssm
