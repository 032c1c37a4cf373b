#include "replay/bytes.h"

#include <gtest/gtest.h>

#include "replay/cursor.h"

namespace replayssm {
namespace {

constexpr RecurrentShape kMamba2{
    .family = Family::kMamba2, .heads = 6, .key_heads = 2, .head_dim = 64, .state_dim = 128};
constexpr RecurrentShape kKda{
    .family = Family::kKimiDelta, .heads = 4, .key_heads = 4, .head_dim = 32, .state_dim = 16};

// Follows a cursor through whole flush cycles and adds up what each step touches.
StateTraffic counted(const DecodeSchedule& s, double checkpoint, double copy, double row) {
  const RingConfig ring{.buffer_len = static_cast<int32_t>(s.buffer_len),
                        .max_window = static_cast<int32_t>(s.window)};
  Cursor cursor = reset_cursor(ring);
  StateTraffic sum;
  const auto step = [&](StateTraffic* traffic) {
    begin_step(cursor, s.window, ring);
    const bool folds = cursor.fold_count > 0;
    const auto rows = static_cast<double>(cursor.fold_count + cursor.ring_count + s.window);
    if (s.route == Route::kConventional) {
      traffic->read_modify_write += 2 * checkpoint;
      traffic->write_only += copy;
    } else {
      (folds ? traffic->read_modify_write : traffic->read_only) +=
          folds ? 2 * checkpoint : (s.read_copy ? copy : checkpoint);
      if (folds) traffic->write_only += copy;
      traffic->ring += rows * row;
    }
    commit_step(cursor, s.accepted, s.route);
    return folds;
  };
  StateTraffic ignored;
  if (s.route != Route::kConventional) {
    while (!step(&ignored)) {
    }
  }
  const int steps = 60 * 59 * 16;  // whole cycles of every length here
  for (int i = 0; i < steps; ++i) step(&sum);
  return sum * (1.0 / steps);
}

TEST(StateTraffic, IsWhatACursorTouchesOverWholeCycles) {
  const double state = 6 * 64 * 128 * 4, row = (6 * 64 + 2 * 128) * 2 + 6 * 2 * 4;
  const double copy = 6 * 64 * 128 + 6 * 64 * 4;
  EXPECT_EQ(checkpoint_bytes(kMamba2, DType::kFloat32), state);
  EXPECT_EQ(ring_row_bytes(kMamba2, DType::kBFloat16), row);
  EXPECT_EQ(read_copy_bytes(kMamba2, DType::kInt8), copy);
  struct Steps {
    int64_t buffer_len, window, accepted;
  };
  for (const Route route : {Route::kConventional, Route::kStateAndOutput, Route::kOutputOnly}) {
    for (const bool copied : {false, true}) {
      for (const Steps c :
           {Steps{1, 1, 1}, Steps{2, 1, 1}, Steps{5, 1, 1}, Steps{16, 1, 1}, Steps{16, 5, 5},
            Steps{16, 5, 3}, Steps{16, 5, 1}, Steps{4, 5, 2}, Steps{5, 5, 5}, Steps{16, 4, 4}}) {
        DecodeSchedule schedule{.route = route,
                                .buffer_len = c.buffer_len,
                                .window = c.window,
                                .accepted = c.accepted,
                                .activation_dtype = DType::kBFloat16};
        if (copied) schedule.read_copy = DType::kInt8;
        const StateTraffic expected = counted(schedule, state, copied ? copy : 0, row);
        const StateTraffic traffic = state_traffic(kMamba2, schedule);
        SCOPED_TRACE(testing::Message() << route_name(route) << " B=" << c.buffer_len
                                        << " T=" << c.window << " a=" << c.accepted);
        EXPECT_NEAR(traffic.read_only, expected.read_only, 1e-9 * state);
        EXPECT_NEAR(traffic.read_modify_write, expected.read_modify_write, 1e-9 * state);
        EXPECT_NEAR(traffic.write_only, expected.write_only, 1e-9 * state);
        EXPECT_NEAR(traffic.ring, expected.ring, 1e-9 * state);
        EXPECT_EQ(traffic.inputs, static_cast<double>(c.window) * (row + 2 * 128 * 2));
        EXPECT_EQ(traffic.outputs, static_cast<double>(c.window) * 6 * 64 * 4);
      }
    }
  }
}

TEST(StateTraffic, KimiDeltaKeepsRawGatesPerColumn) {
  EXPECT_EQ(ring_row_bytes(kKda, DType::kBFloat16), (4 * 32 + 4 * 16 + 4 * 16) * 2 + 4 * 4);
  EXPECT_EQ(token_input_bytes(kKda, DType::kFloat32), (4 * 32 + 4 * 16 * 3) * 4 + 4 * 4);
}

TEST(StateTraffic, OfTheOtherOps) {
  const double state = 4 * 32 * 16 * 2;
  DecodeSchedule schedule{.window = 5, .checkpoint_dtype = DType::kFloat16};
  const StateTraffic snapshots = snapshot_traffic(kKda, schedule);
  EXPECT_EQ(snapshots.read_only, state);
  EXPECT_EQ(snapshots.write_only, 5 * state);
  EXPECT_EQ(snapshots.total(), 6 * state);

  const StateTraffic prefill = prefill_traffic(kKda, schedule);
  EXPECT_EQ(prefill.total(), 2 * state);
  EXPECT_EQ(prefill.outputs, 5 * 4 * 32 * 4);

  schedule.read_copy = DType::kBFloat16;
  const StateTraffic fold = fold_traffic(kKda, schedule, 7);
  EXPECT_EQ(fold.read_modify_write, 2 * state);
  EXPECT_EQ(fold.write_only, 4 * 32 * 16 * 2);
  EXPECT_EQ(fold.ring, 7 * ring_row_bytes(kKda, DType::kFloat32));

  const StateTraffic conv = conv_traffic(10, {.conv_kernel = 4}, 2, DType::kBFloat16);
  EXPECT_EQ(conv.ring, 5 * 10 * 2);
  EXPECT_EQ(conv.inputs, 2 * 10 * 4);
  EXPECT_EQ(conv.outputs, 2 * 10 * 2);
}

TEST(StateTraffic, TakesTimeAtTheSpeedOfItsKind) {
  const StateTraffic traffic{
      .read_only = 300, .read_modify_write = 80, .write_only = 50, .ring = 100, .inputs = 7};
  EXPECT_DOUBLE_EQ(traffic.total(), 530);
  EXPECT_DOUBLE_EQ(traffic.seconds({.read = 100, .read_modify_write = 40, .write = 10}), 11);
}

}  // namespace
}  // namespace replayssm
