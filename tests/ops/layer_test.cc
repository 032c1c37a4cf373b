// A layer's whole step on the CPU.
#include "ops/cpu/layer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/thread_pool.h"
#include "ops/layer_harness.h"
#include "replayssm/error.h"

namespace replayssm::testing {
namespace {

class Layer : public ::testing::TestWithParam<LayerCase> {
 protected:
  // Runs one step; its outputs by window.
  auto runner() {
    return [this](LayerPool& pool, Route route, const std::vector<LayerWindow>& windows) {
      const RingConfig ring = pool.pool.ring();
      for (const LayerWindow& w : windows)
        if (w.slot >= 0) begin_step(pool.pool.cursors[w.slot], w.tokens(), ring);
      LayerCall call(GetParam(), windows);
      auto p =
          call.params([]<class T>(std::vector<T>& x) { return x.empty() ? nullptr : x.data(); },
                      ring, pool.pool.state(), pool.pool.cursors.data(), pool.conv.data());
      p.route = route;
      Array<uint8_t> workspace(cpu::layer_workspace_bytes(p, threads_.size()));
      std::ranges::fill(workspace, 0xff);
      cpu::layer_step(p, workspace.data(), threads_);
      return call.outputs(call.y);
    };
  }

  ThreadPool threads_{2};
};

// The CPU's projections are fp32.
INSTANTIATE_TEST_SUITE_P(Shapes, Layer, ::testing::ValuesIn(layer_cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

TEST_P(Layer, EveryRouteMatchesTheDefinition) {
  for (const Route route : kRoutes)
    for (const int32_t window : {1, 4})
      expect_definition(GetParam(), route, window, false, runner());
}

TEST_P(Layer, TreesMatchTheDefinition) {
  for (const Route route : {Route::kStateAndOutput, Route::kOutputOnly})
    expect_definition(GetParam(), route, 6, true, runner());
}

TEST_P(Layer, NeighboursAndPaddingChangeNoBit) {
  for (const Route route : kRoutes)
    for (const int32_t window : {1, 4}) expect_independence(GetParam(), route, window, runner());
}

TEST(LayerContract, RefusesWhatItDoesNotCompute) {
  const LayerCase c = layer_cases()[1];  // bf16 activations
  LayerPool pool(c, {}, 1);
  pool.clear(0);
  const auto in = layer_inputs(c, 1, 1);
  LayerCall call(c, {{&in, 0, 1, 0, {}}});
  const auto right =
      call.params([]<class T>(std::vector<T>& x) { return x.empty() ? nullptr : x.data(); },
                  pool.pool.ring(), pool.pool.state(), pool.pool.cursors.data(), pool.conv.data());
  ThreadPool threads(1);
  const auto message = [&](auto&& change) {
    auto p = right;
    change(p);
    try {
      cpu::layer_step(p, nullptr, threads);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using P = LayerStepParams;
  EXPECT_EQ(message([](P& p) { p.projected_dtype = DType::kBFloat16; }),
            "projected_dtype: expected float32, got bfloat16");
  EXPECT_EQ(message([](P& p) { p.tokens = 1; }), "tokens: expected at least 2, got 1");
}

}  // namespace
}  // namespace replayssm::testing
