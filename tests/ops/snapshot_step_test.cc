#include <gtest/gtest.h>

#include "core/buffer.h"
#include "ops/recurrent_harness.h"
#include "ops/recurrent_oracle.h"

namespace replayssm::testing {
namespace {

constexpr int64_t kWindow = 4, kSlots = 3;

// Sequences in a pool with snapshots, everything unwritten NaN. Memory is aligned as stores past
// the caches want it, and again so that they cannot be.
class Snapshots {
 public:
  Snapshots(const Case& c, int64_t misalignment)
      : case_(c),
        pool(c, {.buffer_len = 1, .max_window = kWindow}, kSlots),
        bytes_(pool.elements() * dtype_bytes(c.checkpoint)),
        memory_(kSlots * kWindow * bytes_ + misalignment),
        snapshots_(memory_.as<uint8_t>() + misalignment) {
    std::fill_n(snapshots_, kSlots * kWindow * bytes_, 0xff);
  }

  std::vector<std::vector<float>> run(const std::vector<Window>& windows,
                                      const std::vector<int32_t>& source, ThreadPool& threads) {
    Call call(case_, pool, windows, threads.size());
    SnapshotStepParams p;
    static_cast<RecurrentStepParams&>(p) = call.p;
    p.snapshots = snapshots_;
    p.source = source.data();
    cpu::snapshot_step(p, call.workspace(), threads);
    std::vector<std::vector<float>> outputs;
    for (size_t w = 0; w < windows.size(); ++w) outputs.push_back(call.outputs(w));
    return outputs;
  }
  std::span<const uint8_t> snapshot(int64_t slot, int64_t token) const {
    return {snapshots_ + (slot * kWindow + token) * bytes_, static_cast<size_t>(bytes_)};
  }
  std::vector<double> values(int64_t slot, int64_t token) const {
    std::vector<double> x(pool.elements());
    dispatch_float(case_.checkpoint, [&]<class T>() {
      const T* data = reinterpret_cast<const T*>(snapshot(slot, token).data());
      for (size_t i = 0; i < x.size(); ++i) x[i] = to_float(data[i]);
    });
    return x;
  }

 private:
  Case case_;

 public:
  Pool pool;

 private:
  int64_t bytes_;
  Buffer memory_;
  uint8_t* snapshots_;
};

class SnapshotStep : public ::testing::TestWithParam<Case> {
 protected:
  ThreadPool threads_{2};
};

INSTANTIATE_TEST_SUITE_P(Shapes, SnapshotStep, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

// Any number of drafts is accepted; outputs and every snapshot are those of the definition, and
// with an fp32 state bit for bit what one token at a time stores.
TEST_P(SnapshotStep, EveryTokenLeavesItsState) {
  const Case c = GetParam();
  const auto in = random_inputs(c, 40, 3);
  for (const int64_t misalignment : {0, 4}) {
    SCOPED_TRACE(name(c) + " misaligned by " + std::to_string(misalignment));
    Snapshots snapshots(c, misalignment);
    snapshots.pool.clear(1);
    Pool single(c, {}, 1);
    single.clear(0);
    Oracle oracle(c);
    std::mt19937 random(8);
    int32_t source = -1;
    for (int64_t t = 0; t + kWindow <= 40;) {
      const int64_t tokens = 1 + static_cast<int64_t>(random() % kWindow);
      const auto o = snapshots.run({{&in, t, t + tokens, 1, {}}}, {source}, threads_)[0];
      EXPECT_LT(relative_error(o, oracle.outputs(in, t, t + tokens)), output_tolerance(c));
      const int64_t accepted = 1 + static_cast<int64_t>(random() % tokens);
      for (int64_t i = 0; i < accepted; ++i) {
        oracle.commit(in, t + i);
        EXPECT_LT(relative_error(snapshots.values(1, i), oracle.state()), state_tolerance(c));
        decode(c, single, Route::kConventional, in, t + i, t + i + 1, 1, threads_);
        if (c.checkpoint == DType::kFloat32) {
          EXPECT_TRUE(std::ranges::equal(snapshots.snapshot(1, i), single.slot(0)))
              << "token " << i;
        }
      }
      source = static_cast<int32_t>(accepted) - 1;
      t += accepted;
    }
  }
}

TEST_P(SnapshotStep, TouchesItsOwnSlotsOnly) {
  const Case c = GetParam();
  const auto in = random_inputs(c, 12, 5), other = random_inputs(c, 12, 6);
  Snapshots snapshots(c, 0);
  snapshots.pool.clear(0);
  const auto before = snapshots.pool.contents(0);
  const auto o = snapshots.run({{&other, 0, 2, -1, {}}, {&in, 0, 3, 0, {}}, {&other, 5, 5, 2, {}}},
                               {-1, -1, -1}, threads_);
  for (const float value : o[0]) EXPECT_EQ(value, 0.0f);
  EXPECT_EQ(snapshots.pool.contents(0), before);
  const auto blank = [](uint8_t byte) { return byte == 0xff; };
  EXPECT_TRUE(std::ranges::all_of(snapshots.snapshot(0, 3), blank));
  for (const int64_t slot : {1, 2}) {
    EXPECT_TRUE(snapshots.pool.untouched(slot));
    for (int64_t i = 0; i < kWindow; ++i)
      EXPECT_TRUE(std::ranges::all_of(snapshots.snapshot(slot, i), blank));
  }
  // Neighbours change nothing.
  Snapshots alone(c, 0);
  alone.pool.clear(0);
  EXPECT_EQ(alone.run({{&in, 0, 3, 0, {}}}, {-1}, threads_)[0], o[1]);
}

}  // namespace
}  // namespace replayssm::testing
