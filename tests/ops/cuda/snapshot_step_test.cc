// Speculative decoding by snapshots on the device.
#include "ops/cuda/snapshot_step.h"

#include "ops/cuda/harness.h"
#include "ops/cuda/launches.h"
#include "replayssm/error.h"

namespace replayssm::testing {
namespace {

constexpr int64_t kSlots = 3;

// Sequences in a pool with snapshots, everything unwritten NaN. Memory is aligned to 16 bytes, and
// again so that it is not.
class Snapshots {
 public:
  Snapshots(const Case& c, int64_t window, int64_t misalignment)
      : case_(c),
        pool(c, {.buffer_len = 1, .max_window = static_cast<int32_t>(window)}, kSlots),
        window_(window),
        misalignment_(misalignment),
        bytes_(pool.elements() * dtype_bytes(c.checkpoint)),
        memory_(kSlots * window * bytes_ + misalignment, 0xff) {}

  std::vector<std::vector<float>> run(const std::vector<Window>& windows,
                                      const std::vector<int32_t>& source, bool graph = false) {
    DevicePool device(pool);
    const DeviceCall call(case_, pool, device, windows);
    const DeviceArray<int32_t> sources(source);
    const DeviceArray<uint8_t> memory(memory_);
    SnapshotStepParams p;
    static_cast<RecurrentStepParams&>(p) = call.p;
    p.snapshots = memory.data() + misalignment_;
    p.source = sources.data();
    run_call([&](cudaStream_t stream) { cuda::snapshot_step(p, stream); }, graph);
    device.download();
    memory.download(memory_);
    std::vector<std::vector<float>> outputs;
    for (size_t w = 0; w < windows.size(); ++w) outputs.push_back(call.outputs(w));
    return outputs;
  }
  std::span<const uint8_t> snapshot(int64_t slot, int64_t token) const {
    return std::span(memory_).subspan(misalignment_ + (slot * window_ + token) * bytes_, bytes_);
  }
  std::vector<double> values(int64_t slot, int64_t token) const {
    std::vector<double> x(pool.elements());
    dispatch_float(case_.checkpoint, [&]<class T>() {
      std::vector<T> state(x.size());
      std::memcpy(state.data(), snapshot(slot, token).data(), bytes_);
      for (size_t i = 0; i < x.size(); ++i) x[i] = to_float(state[i]);
    });
    return x;
  }
  const std::vector<uint8_t>& memory() const { return memory_; }

 private:
  Case case_;

 public:
  Pool pool;

 private:
  int64_t window_, misalignment_, bytes_;
  std::vector<uint8_t> memory_;
};

// Those of the CPU, and the sizes that are fast here.
std::vector<Case> snapshot_cases() {
  std::vector<Case> list = cases();
  for (const Case& c : device_cases())
    if (!c.read_copy) list.push_back(c);
  constexpr auto f32 = DType::kFloat32, b16 = DType::kBFloat16, f16 = DType::kFloat16;
  for (const Family family : {Family::kMamba2, Family::kGatedDelta, Family::kKimiDelta}) {
    for (const int64_t state_dim : {64, 256}) {
      list.push_back({{family, 4, 2, 40, state_dim}, b16, f32});
      list.push_back({{family, 2, 2, 33, state_dim}, f32, b16, b16, true, -5.0f});
      list.push_back({{family, 2, 1, 64, state_dim}, f16, f16, f16, true});
    }
    list.push_back({{family, 2, 1, 5, 1024}, b16, f32});
    list.push_back({{family, 2, 1, 9, 300}, f32, f16});
  }
  return list;
}

class CudaSnapshotStep : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Shapes, CudaSnapshotStep, ::testing::ValuesIn(snapshot_cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

// What the conventional step on the device takes.
bool has_conventional(const Case& c) {
  return c.shape.state_dim == 128 && c.shape.head_dim % 8 == 0 && !c.read_copy;
}

// Any number of drafts is accepted; outputs and every snapshot are those of the definition, and
// with an fp32 state bit for bit what the conventional route stores one token at a time.
TEST_P(CudaSnapshotStep, EveryTokenLeavesItsState) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  constexpr int64_t kWindow = 4;
  const auto in = random_inputs(c, 40, 3);
  for (const int64_t misalignment : {0, 4}) {
    SCOPED_TRACE(name(c) + " misaligned by " + std::to_string(misalignment));
    Snapshots snapshots(c, kWindow, misalignment);
    snapshots.pool.clear(1);
    Pool single(c, {}, 1);
    single.clear(0);
    Oracle oracle(c);
    std::mt19937 random(8);
    int32_t source = -1;
    for (int64_t t = 0; t + kWindow <= 40;) {
      const int64_t tokens = 1 + static_cast<int64_t>(random() % kWindow);
      const auto o = snapshots.run({{&in, t, t + tokens, 1, {}}}, {source})[0];
      EXPECT_LT(relative_error(o, oracle.outputs(in, t, t + tokens)), output_tolerance(c));
      const int64_t accepted = 1 + static_cast<int64_t>(random() % tokens);
      for (int64_t i = 0; i < accepted; ++i) {
        oracle.commit(in, t + i);
        EXPECT_LT(relative_error(snapshots.values(1, i), oracle.state()), state_tolerance(c));
        if (c.checkpoint != DType::kFloat32 || !has_conventional(c)) continue;
        decode(c, single, Route::kConventional, in, t + i, t + i + 1, 1);
        EXPECT_TRUE(std::ranges::equal(snapshots.snapshot(1, i), single.slot(0))) << "token " << i;
      }
      source = static_cast<int32_t>(accepted) - 1;
      t += accepted;
    }
  }
}

TEST_P(CudaSnapshotStep, TouchesItsOwnSlotsOnly) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const auto in = random_inputs(c, 12, 5), other = random_inputs(c, 12, 6);
  Snapshots snapshots(c, 4, 0);
  snapshots.pool.clear(0);
  const auto before = snapshots.pool.contents(0);
  const auto o = snapshots.run({{&other, 0, 2, -1, {}}, {&in, 0, 3, 0, {}}, {&other, 5, 5, 2, {}}},
                               {-1, -1, -1});
  for (const float value : o[0]) EXPECT_EQ(value, 0.0f);
  EXPECT_EQ(snapshots.pool.contents(0), before);
  const auto blank = [](uint8_t byte) { return byte == 0xff; };
  EXPECT_TRUE(std::ranges::all_of(snapshots.snapshot(0, 3), blank));
  for (const int64_t slot : {1, 2}) {
    EXPECT_TRUE(snapshots.pool.untouched(slot));
    for (int64_t i = 0; i < 4; ++i)
      EXPECT_TRUE(std::ranges::all_of(snapshots.snapshot(slot, i), blank));
  }
  // Neighbours change nothing.
  Snapshots alone(c, 4, 0);
  alone.pool.clear(0);
  EXPECT_EQ(alone.run({{&in, 0, 3, 0, {}}}, {-1})[0], o[1]);
}

// Windows longer than what a block stages at once; five runs and a captured one.
TEST_P(CudaSnapshotStep, LongWindowsAreTheirTokens) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  constexpr int64_t kWindow = 37;
  const auto in = random_inputs(c, kWindow, 11);
  const auto [memory, o] = same_in_every_run([&](bool graph) {
    Snapshots snapshots(c, kWindow, 0);
    snapshots.pool.clear(2);
    const auto outputs = snapshots.run({{&in, 0, kWindow, 2, {}}}, {-1}, graph)[0];
    return std::pair(snapshots.memory(), outputs);
  });
  const Oracle oracle(c);
  EXPECT_LT(relative_error(o, oracle.outputs(in, 0, kWindow)), output_tolerance(c)) << name(c);
  if (c.checkpoint != DType::kFloat32) return;
  Snapshots steps(c, kWindow, 0);
  steps.pool.clear(2);
  std::vector<float> single;
  for (int64_t t = 0; t < 3; ++t) {
    const auto one = steps.run({{&in, t, t + 1, 2, {}}}, {t == 0 ? -1 : 0})[0];
    single.insert(single.end(), one.begin(), one.end());
  }
  EXPECT_TRUE(std::equal(single.begin(), single.end(), o.begin())) << name(c);
}

TEST(CudaSnapshotContracts, WrongArgumentsAreNamed) {
  alignas(16) float data[16];
  int32_t slot = 0;
  SnapshotStepParams p;
  p.shape = {.heads = 1, .key_heads = 1, .head_dim = 4, .state_dim = 4};
  p.batch = {1, &slot, &slot, reinterpret_cast<const Cursor*>(data), {}};
  p.state.checkpoint = data;
  p.v = p.k = p.q = data;
  p.v_stride = p.k_stride = p.q_stride = 4;
  p.b = p.g = data;
  p.o = data;
  const auto message = [&](auto&& change) {
    SnapshotStepParams changed = p;
    changed.snapshots = data;
    changed.source = &slot;
    change(changed);
    try {
      cuda::snapshot_step(changed, nullptr);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using P = SnapshotStepParams;
  EXPECT_EQ(message([](P& p) { p.source = nullptr; }),
            "source: expected memory, got a null pointer");
  EXPECT_EQ(message([&](P& p) { p.batch.parent = &slot; }),
            "batch.parent: expected null for snapshots, got a pointer");
  EXPECT_EQ(message([](P& p) { p.shape.state_dim = 1025; }),
            "shape.state_dim: expected at most 1024, got 1025");
  const uint64_t seed = 1;
  EXPECT_EQ(message([&](P& p) { p.rounding.seed = &seed; }),
            "rounding.seed: expected null for snapshots, got a pointer");
}

}  // namespace
}  // namespace replayssm::testing
