#include "replay/step_plan.h"

#include <gtest/gtest.h>

#include <vector>

namespace replayssm {
namespace {

TEST(StepPlan, EverySequenceHasAPlaceOfItsOwn) {
  for (int32_t count = 1; count <= 65; ++count)
    for (int32_t folds = 0; folds <= count; ++folds) {
      std::vector<int> taken(count);
      for (int32_t rank = 0; rank < folds; ++rank)
        ++taken.at(planned_place(true, rank, folds, count));
      for (int32_t rank = 0; rank < count - folds; ++rank)
        ++taken.at(planned_place(false, rank, folds, count));
      EXPECT_EQ(taken, std::vector<int>(count, 1)) << folds << " of " << count;
    }
}

TEST(StepPlan, NoFoldComesLast) {
  for (int32_t folds = 1; folds <= 50; ++folds)
    EXPECT_LT(planned_place(true, folds - 1, folds, 100), 50) << folds;
}

TEST(StepPlan, RowsLieWhereTheCursorSays) {
  const RingConfig ring{.buffer_len = 16, .max_window = 5, .conv_kernel = 4};
  for (const int32_t count : {3, 14}) {  // the second folds
    Cursor cursor{.ring_start = 1000003, .ring_count = count, .ring_limit = 16};
    begin_step(cursor, 5, ring);
    const SequencePlan plan = plan_sequence(2, 7, 40, 5, cursor, ring);
    EXPECT_EQ(plan.sequence, 2);
    EXPECT_EQ(plan.slot, 7);
    EXPECT_EQ(plan.token, 40);
    EXPECT_EQ(plan.window, 5);
    EXPECT_EQ(plan.ring_first, 1000003 % 21);
    EXPECT_EQ(plan.history, count);
    EXPECT_EQ(plan.folded, count > 11 ? count : 0);
    EXPECT_EQ(plan.conv_first, (1000003 + count) % 8);
  }
}

}  // namespace
}  // namespace replayssm
