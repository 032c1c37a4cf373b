// A layer's whole step on the device.
#include "ops/cuda/layer.h"

#include "ops/cuda/harness.h"
#include "ops/cuda/launches.h"
#include "ops/layer_harness.h"

namespace replayssm::testing {
namespace {

// The kernels read projections in fp32 and in the activation type.
std::vector<LayerCase> device_layer_cases() {
  std::vector<LayerCase> all = layer_cases();
  for (const LayerCase& c : layer_cases()) {
    if (c.base.activation == DType::kFloat32) continue;
    all.push_back(c);
    all.back().projected = c.base.activation;
  }
  all.push_back(all[1]);
  all.back().base.read_copy = DType::kFloat8E4M3;
  return all;
}

// Device copies of a call's arrays, at the same addresses from call to call of one size.
class Placed {
 public:
  void restart() { next_ = 0; }
  template <class T>
  T* operator()(const std::vector<T>& x) const {
    if (next_ == arrays_.size()) arrays_.push_back(std::make_unique<DeviceArray<uint8_t>>());
    auto& array = *arrays_[next_++];
    const auto* bytes = reinterpret_cast<const uint8_t*>(x.data());
    array = std::vector<uint8_t>(bytes, bytes + x.size() * sizeof(T));
    last_ = &array;
    return reinterpret_cast<T*>(array.data());
  }
  // What the array placed last holds: the outputs.
  std::vector<uint8_t> last() const {
    std::vector<uint8_t> bytes;
    last_->download(bytes);
    return bytes;
  }

 private:
  mutable std::vector<std::unique_ptr<DeviceArray<uint8_t>>> arrays_;
  mutable DeviceArray<uint8_t>* last_ = nullptr;
  mutable size_t next_ = 0;
};

enum class How { kFused, kUnfused, kOneWarp, kSliced, kAhead };

// Runs one step, on a mirror of the pool; its outputs by window.
struct Runner {
  LayerCase c;
  How how = How::kFused;

  std::vector<std::vector<float>> operator()(LayerPool& pool, Route route,
                                             const std::vector<LayerWindow>& windows) const {
    DevicePool device(pool.pool);
    DeviceArray<uint8_t> conv(pool.conv.bytes);
    LayerCall call(c, windows);
    Placed place;
    auto p = call.params(place, pool.pool.ring(), device.state(), device.cursors(), conv.data());
    p.route = route;
    if (route == Route::kConventional) p.state.read_copy = {};
    const DeviceArray<uint8_t> workspace(
        std::vector<uint8_t>(cuda::layer_workspace_bytes(p), 0xff));
    cuda::begin_steps(p.batch, device.cursors(), nullptr);
    const auto current = cuda::current_device();
    const int slices = c.base.shape.head_dim % 16 == 0 ? 2 : 1;
    switch (how) {
      case How::kFused: cuda::layer_step(p, workspace.data(), current, nullptr); break;
      case How::kUnfused: cuda::layer_step_unfused(p, workspace.data(), current, nullptr); break;
      case How::kOneWarp:
        cuda::layer_step(p, workspace.data(), {.heads = 1, .slices = 1, .warps = 1}, nullptr);
        break;
      case How::kSliced:
        cuda::layer_step(p, workspace.data(), {.heads = 1, .slices = slices, .warps = 4}, nullptr);
        break;
      case How::kAhead:
        cuda::layer_step(p, workspace.data(), ahead_launch(c.base.shape, 4), nullptr);
        break;
    }
    synchronize();
    device.download();
    conv.download(pool.conv.bytes);
    return call.outputs(place.last());
  }
};

class CudaLayer : public ::testing::TestWithParam<LayerCase> {};

INSTANTIATE_TEST_SUITE_P(Shapes, CudaLayer, ::testing::ValuesIn(device_layer_cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

TEST_P(CudaLayer, EveryRouteMatchesTheDefinition) {
  REQUIRE_DEVICE();
  if (GetParam().base.read_copy) return;  // compared with the unfused ops below
  for (const Route route : kRoutes)
    for (const int32_t window : {1, 4})
      expect_definition(GetParam(), route, window, false, Runner{GetParam()});
}

TEST_P(CudaLayer, TreesMatchTheDefinition) {
  REQUIRE_DEVICE();
  if (GetParam().base.read_copy) return;  // compared with the unfused ops below
  for (const Route route : {Route::kStateAndOutput, Route::kOutputOnly})
    expect_definition(GetParam(), route, 6, true, Runner{GetParam()});
}

TEST_P(CudaLayer, NeighboursAndPaddingChangeNoBit) {
  REQUIRE_DEVICE();
  for (const Route route : kRoutes)
    for (const int32_t window : {1, 4})
      expect_independence(GetParam(), route, window, Runner{GetParam()});
}

// Outputs, rings, checkpoints and kept inputs, however blocks are cut.
TEST_P(CudaLayer, FusedIsUnfusedBitForBit) {
  REQUIRE_DEVICE();
  const LayerCase c = GetParam();
  std::mt19937 random(21);
  for (const Route route : kRoutes) {
    for (const int32_t max_window : {1, 5}) {
      SCOPED_TRACE(name(c) + " " + route_name(route) + " T=" + std::to_string(max_window));
      LayerPool pool(c, {.buffer_len = 4, .max_window = max_window}, 2);
      for (const int slot : {0, 1}) pool.clear(slot, slot * 1000003);
      const auto in = layer_inputs(c, 40, 22);
      for (int64_t t = 0; t + max_window <= 24;) {
        const auto count = static_cast<int32_t>(1 + random() % max_window);
        const bool tree = route != Route::kConventional && random() % 2;
        const std::vector<LayerWindow> windows = {
            {&in, t, t + count, 1, tree ? random_tree(random, count) : std::vector<int32_t>()},
            {&in, 30, 30 + max_window, -1, {}},
            {&in, t + 1, t + 2, 0, {}}};
        LayerPool unfused = pool;
        const auto want = Runner{c, How::kUnfused}(unfused, route, windows);
        LayerPool fused = pool;
        const auto run = [&](How how) {
          fused = pool;
          const auto outputs = Runner{c, how}(fused, route, windows);
          for (const int slot : {0, 1})
            EXPECT_EQ(fused.contents(slot), unfused.contents(slot)) << int(how);
          return outputs;
        };
        const auto outputs = run(How::kFused);
        if (c.conv_kernel == cuda::kFusedTaps) {
          EXPECT_EQ(run(How::kOneWarp), outputs);
          EXPECT_EQ(run(How::kSliced), outputs);
          // Unfused it may run ahead, and its outputs have other bits then.
          EXPECT_EQ(run(How::kAhead), want);
        }
        if (c.conv_kernel != cuda::kFusedTaps || route == Route::kConventional || tree ||
            !cuda::are_operands(c.base.activation)) {
          EXPECT_EQ(outputs, want);
        }
        pool = fused;
        for (const int slot : {0, 1}) {
          std::vector<int64_t> path(slot == 0 ? 1 : windows[0].tokens());
          std::iota(path.begin(), path.end(), 0);
          pool.accept(slot, path, route);
        }
        t += count;
      }
    }
  }
}

// Begin, layer and commit in one graph, captured once: whatever the windows hold, flush and
// accept, it does what the calls do.
TEST_P(CudaLayer, AStepAsAGraphIsTheStep) {
  REQUIRE_DEVICE();
  const LayerCase c = GetParam();
  constexpr int32_t kWindow = 4, kSlots = 3;
  constexpr Route kRoute = Route::kOutputOnly;
  std::mt19937 random(31);
  LayerPool start(c, {.buffer_len = 5, .max_window = kWindow}, kSlots);
  for (int32_t s = 0; s < kSlots; ++s) start.clear(s, s * 3);
  const auto in = layer_inputs(c, 60, 32);
  // One of the two ways to run steps, on a device copy of the pool.
  struct Side {
    Side(const LayerPool& from) : pool(from), device(pool.pool), conv(pool.conv.bytes) {}
    LayerPool pool;
    DevicePool device;
    DeviceArray<uint8_t> conv, workspace;
    DeviceArray<int32_t> accepted;
    Placed place;
  } eager(start), captured(start);
  std::unique_ptr<Graph> graph;
  for (int step = 0; step < 20; ++step) {
    std::vector<LayerWindow> windows;
    std::vector<int32_t> accepted;
    for (int32_t s = 0; s < kSlots; ++s) {
      const int64_t count = random() % (kWindow + 1);
      windows.push_back({&in, step, step + count, s, {}});
      accepted.push_back(static_cast<int32_t>(random() % (count + 1)));
    }
    LayerCall call(c, windows, kWindow * kSlots + 2);
    std::vector<uint8_t> outputs[2];
    for (Side* side : {&eager, &captured}) {
      side->place.restart();
      auto p = call.params(side->place, side->pool.pool.ring(), side->device.state(),
                           side->device.cursors(), side->conv.data());
      side->accepted = accepted;
      if (step == 0) side->workspace = std::vector<uint8_t>(cuda::layer_workspace_bytes(p), 0xff);
      const Call whole = [&](cudaStream_t stream) {
        cuda::begin_steps(p.batch, side->device.cursors(), stream);
        cuda::layer_step(p, side->workspace.data(), cuda::current_device(), stream);
        cuda::commit_steps(p.batch, side->accepted.data(), kRoute, side->device.cursors(), stream);
      };
      if (side == &eager) {
        run_call(whole);
      } else {
        if (!graph) graph = std::make_unique<Graph>(whole);
        graph->replay();
      }
      outputs[side == &captured] = side->place.last();
    }
    EXPECT_EQ(outputs[0], outputs[1]) << "step " << step;
  }
  for (Side* side : {&eager, &captured}) {
    side->device.download();
    side->conv.download(side->pool.conv.bytes);
  }
  for (int32_t s = 0; s < kSlots; ++s)
    EXPECT_EQ(eager.pool.contents(s), captured.pool.contents(s)) << "slot " << s;
}

}  // namespace
}  // namespace replayssm::testing
