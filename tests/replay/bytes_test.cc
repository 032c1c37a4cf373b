#include "replay/bytes.h"

#include <gtest/gtest.h>

#include "replay/cursor.h"

namespace replayssm {
namespace {

constexpr RecurrentShape kShape{.heads = 6, .key_heads = 2, .head_dim = 64, .state_dim = 128};

// Follows a cursor through whole flush cycles and adds up what each step touches.
StateTraffic counted(Route route, int32_t buffer_len, int64_t state, int64_t row) {
  const RingConfig ring{.buffer_len = buffer_len};
  Cursor cursor = reset_cursor(ring);
  StateTraffic sum;
  const auto step = [&](StateTraffic* traffic) {
    begin_step(cursor, 1, ring);
    const auto rows = static_cast<double>(cursor.fold_count + cursor.ring_count + 1);
    if (route == Route::kConventional) {
      traffic->read_modify_write += 2.0 * static_cast<double>(state);
    } else {
      (cursor.fold_count > 0 ? traffic->read_modify_write : traffic->read_only) +=
          (cursor.fold_count > 0 ? 2.0 : 1.0) * static_cast<double>(state);
      traffic->ring += rows * static_cast<double>(row);
    }
    commit_step(cursor, 1, route);
  };
  StateTraffic ignored;
  for (int i = 0; i < buffer_len; ++i) step(&ignored);
  const int cycles = 3;
  for (int i = 0; i < cycles * buffer_len; ++i) step(&sum);
  const double steps = cycles * buffer_len;
  return {sum.read_only / steps, sum.read_modify_write / steps, sum.ring / steps};
}

TEST(StateTraffic, IsWhatACursorTouchesOverWholeCycles) {
  const int64_t state = 6 * 64 * 128 * 4, row = (6 * 64 + 2 * 128) * 2 + 6 * 2 * 4;
  EXPECT_EQ(checkpoint_bytes(kShape, DType::kFloat32), state);
  EXPECT_EQ(ring_row_bytes(kShape, DType::kBFloat16), row);
  for (const Route route : {Route::kConventional, Route::kStateAndOutput, Route::kOutputOnly}) {
    for (const int32_t buffer_len : {1, 2, 5, 16, 64}) {
      const StateTraffic expected = counted(route, buffer_len, state, row);
      const StateTraffic traffic =
          state_traffic(kShape, route, buffer_len, DType::kFloat32, DType::kBFloat16);
      EXPECT_DOUBLE_EQ(traffic.read_only, expected.read_only) << buffer_len;
      EXPECT_DOUBLE_EQ(traffic.read_modify_write, expected.read_modify_write) << buffer_len;
      EXPECT_DOUBLE_EQ(traffic.ring, expected.ring) << buffer_len;
    }
  }
}

TEST(StateTraffic, TakesTimeAtTheSpeedOfItsKind) {
  const StateTraffic traffic{.read_only = 300, .read_modify_write = 80, .ring = 100};
  EXPECT_DOUBLE_EQ(traffic.total(), 480);
  EXPECT_DOUBLE_EQ(traffic.seconds(100, 40), 6);
}

}  // namespace
}  // namespace replayssm
