// The order in which a thread takes its blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "ops/cpu/recurrent_blocks.h"

namespace replayssm::cpu {
namespace {

constexpr RecurrentShape kShape{Family::kGatedDelta, 4, 2, 8, 8};  // two blocks a sequence

struct OrderCase {
  std::vector<bool> folds;  // of every sequence
  int64_t begin, end;       // the thread's blocks
};

class BlockOrders : public ::testing::TestWithParam<OrderCase> {
 protected:
  BlockOrders() {
    const std::vector<bool>& folds = GetParam().folds;
    for (size_t s = 0; s < folds.size(); ++s) {
      slots_.push_back(static_cast<int32_t>(s));
      cursors_.push_back({.fold_count = folds[s] ? 3 : 0});
    }
    batch_.sequences = static_cast<int64_t>(folds.size());
    batch_.slot = slots_.data();
    batch_.cursors = cursors_.data();
  }

  std::vector<int64_t> order() const {
    const BlockList blocks(batch_.sequences, kShape, 1);
    BlockOrder order(blocks, batch_, GetParam().begin, GetParam().end);
    std::vector<int64_t> taken;
    for (int64_t i; (i = order.next()) >= 0;) taken.push_back(i);
    EXPECT_EQ(order.next(), -1);
    return taken;
  }
  bool folds(int64_t block) const {
    return cursors_[static_cast<size_t>(block / 2)].fold_count > 0;
  }

  std::vector<int32_t> slots_;
  std::vector<Cursor> cursors_;
  SequenceBatch batch_;
};

TEST_P(BlockOrders, TakesEveryBlockOnce) {
  std::vector<int64_t> taken = order();
  std::ranges::sort(taken);
  std::vector<int64_t> all(static_cast<size_t>(GetParam().end - GetParam().begin));
  std::iota(all.begin(), all.end(), GetParam().begin);
  EXPECT_EQ(taken, all);
}

TEST_P(BlockOrders, SpreadsThoseThatFold) {
  const std::vector<int64_t> taken = order();
  const auto count = static_cast<int64_t>(taken.size());
  const int64_t folding = std::ranges::count_if(taken, [&](int64_t i) { return folds(i); });
  int64_t so_far = 0;
  for (int64_t i = 0; i < count; ++i) {
    so_far += folds(taken[static_cast<size_t>(i)]);
    EXPECT_LE(std::abs(so_far * count - (i + 1) * folding), count) << "behind block " << i;
  }
}

TEST_P(BlockOrders, KeepsTheOrderOfEachKind) {
  for (const bool kind : {false, true}) {
    std::vector<int64_t> taken = order();
    std::erase_if(taken, [&](int64_t i) { return folds(i) != kind; });
    EXPECT_TRUE(std::ranges::is_sorted(taken));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, BlockOrders,
    ::testing::Values(OrderCase{{}, 0, 0}, OrderCase{{false}, 0, 2}, OrderCase{{true}, 0, 2},
                      OrderCase{{false, true, false, false}, 0, 8},
                      OrderCase{{true, true, true, false}, 0, 8},
                      OrderCase{{true, true, false, false, true, false}, 3, 11}));

TEST(BlockOrder, PaddingReads) {
  const std::vector<int32_t> slots{-1, 0};
  const std::vector<Cursor> cursors{{.fold_count = 1}};
  SequenceBatch batch;
  batch.sequences = 2;
  batch.slot = slots.data();
  batch.cursors = cursors.data();
  const BlockList blocks(2, kShape, 1);
  BlockOrder order(blocks, batch, 0, 4);
  std::vector<int64_t> taken(4);
  std::ranges::generate(taken, [&] { return order.next(); });
  std::ranges::sort(taken);
  EXPECT_EQ(taken, (std::vector<int64_t>{0, 1, 2, 3}));
}

}  // namespace
}  // namespace replayssm::cpu
