#include "replay/cursors.h"

#include <gtest/gtest.h>

#include <array>

namespace replayssm {

static bool operator==(const Cursor& x, const Cursor& y) {
  return x.ring_start == y.ring_start && x.ring_count == y.ring_count &&
         x.ring_limit == y.ring_limit && x.fold_count == y.fold_count;
}

namespace {

constexpr RingConfig kRing{.buffer_len = 6, .max_window = 4, .conv_kernel = 3};
constexpr Cursor kUnused{.ring_start = -77, .ring_count = -77, .ring_limit = -77};

// A batch of three sequences and padding, in a pool where slot 1 belongs to nobody.
class Cursors : public ::testing::Test {
 protected:
  static constexpr std::array<int32_t, 4> kSlot = {3, -1, 0, 2};
  static constexpr std::array<int32_t, 5> kStart = {0, 2, 4, 5, 9};
  static constexpr std::array<int32_t, 4> kAccepted = {2, 1, 0, 3};

  void expect(std::array<Cursor, 3> of_3_0_2) const {
    EXPECT_TRUE(cursors_[3] == of_3_0_2[0]);
    EXPECT_TRUE(cursors_[0] == of_3_0_2[1]);
    EXPECT_TRUE(cursors_[2] == of_3_0_2[2]);
    EXPECT_TRUE(cursors_[1] == kUnused);
    EXPECT_TRUE(cursors_[4] == kUnused);
  }

  std::array<Cursor, 5> cursors_ = {kUnused, kUnused, kUnused, kUnused, kUnused};
};

// Each sequence of the batch moves as it would on its own.
TEST_F(Cursors, MoveEachOnItsOwn) {
  reset_slots(4, kSlot.data(), kRing, cursors_.data());
  std::array<Cursor, 3> want = {reset_cursor(kRing), reset_cursor(kRing), reset_cursor(kRing)};
  expect(want);

  commit_prefills(4, kSlot.data(), kStart.data(), kRing, cursors_.data());
  for (const auto& [i, tokens] : {std::pair{0, 2}, {1, 1}, {2, 4}})
    commit_prefill(want[i], tokens, kRing);
  expect(want);

  for (int step = 0; step < 5; ++step) {
    begin_steps(4, kSlot.data(), kStart.data(), kRing, cursors_.data());
    for (const auto& [i, tokens] : {std::pair{0, 2}, {1, 1}, {2, 4}})
      begin_step(want[i], tokens, kRing);
    expect(want);
    for (const Route route : {Route::kOutputOnly, Route::kConventional}) {
      auto saved = cursors_;
      auto moved = want;
      commit_steps(4, kSlot.data(), kAccepted.data(), route, cursors_.data());
      for (const auto& [i, accepted] : {std::pair{0, 2}, {1, 0}, {2, 3}})
        commit_step(moved[i], accepted, route);
      expect(moved);
      if (route == Route::kOutputOnly) {
        cursors_ = saved;
      }
    }
    for (const auto& [i, accepted] : {std::pair{0, 2}, {1, 0}, {2, 3}})
      commit_step(want[i], accepted, Route::kConventional);
  }

  for (Cursor* cursor : {&cursors_[3], &cursors_[0], &want[0], &want[1]}) cursor->ring_count = 2;
  commit_folds(4, kSlot.data(), nullptr, cursors_.data());
  for (Cursor& cursor : want) commit_fold(cursor);
  expect(want);
}

TEST_F(Cursors, FoldsAndCopiesIntoOtherSlotsLeaveTheSources) {
  reset_slots(4, kSlot.data(), kRing, cursors_.data());
  cursors_[3].ring_count = 5;
  const Cursor source = cursors_[3], second = cursors_[2];
  const int32_t slot[] = {3, -1, 2}, target[] = {4, 0, -1};
  commit_folds(3, slot, target, cursors_.data());
  EXPECT_TRUE(cursors_[3] == source);
  EXPECT_TRUE(cursors_[2] == second);
  EXPECT_EQ(cursors_[4].ring_count, 0);
  EXPECT_EQ(committed_tokens(cursors_[4], kRing), committed_tokens(source, kRing));
  EXPECT_TRUE(cursors_[0] == reset_cursor(kRing));

  copy_cursors(3, slot, target, cursors_.data());
  EXPECT_TRUE(cursors_[4] == source);
  EXPECT_TRUE(cursors_[0] == reset_cursor(kRing));
}

}  // namespace
}  // namespace replayssm
