// A layer's whole step on the CPU.
#include "ops/cpu/layer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "core/thread_pool.h"
#include "ops/check_params.h"
#include "ops/layer_harness.h"
#include "replayssm/error.h"

namespace replayssm::testing {
namespace {

using ::testing::HasSubstr;

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

using P = LayerStepParams;

// What the CPU says of a call that `change` has spoilt; alignment as the CUDA kernels want it.
std::string refusal(const LayerCase& c, const std::function<void(P&)>& change) {
  LayerPool pool(c, {}, 1);
  pool.clear(0);
  const auto in = layer_inputs(c, 1, 1);
  LayerCall call(c, {{&in, 0, 1, 0, {}}});
  auto p =
      call.params([]<class T>(std::vector<T>& x) { return x.empty() ? nullptr : x.data(); },
                  pool.pool.ring(), pool.pool.state(), pool.pool.cursors.data(), pool.conv.data());
  change(p);
  ThreadPool threads(1);
  Array<uint8_t> workspace(1 << 20);
  try {
    check_params(p, 16);
    cpu::layer_step(p, workspace.data(), threads);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(LayerContract, NamesWhatIsWrong) {
  const auto cases = layer_cases();
  const LayerCase &m = cases[1], &g = cases[6], &k = cases[10];  // bf16 activations
  for (const LayerCase* c : {&m, &g, &k}) EXPECT_EQ(refusal(*c, [](P&) {}), "no error");
  const auto byte = [](const void* p) { return static_cast<const char*>(p) + 8; };
  EXPECT_EQ(refusal(m, [](P& p) { p.conv.channels = 190; }),
            "conv.channels: expected HV V + 2 H K = 1024, got 190");
  EXPECT_EQ(refusal(m, [](P& p) { p.conv.v = 520; }),
            "conv.v: expected the first of 512 of 1024 channels, 16-byte aligned, got 520");
  EXPECT_THAT(refusal(m, [](P& p) { p.conv.q = 4; }), HasSubstr("conv.q: expected the first of"));
  EXPECT_EQ(refusal(m, [](P& p) { p.conv.x_stride = 1020; }),
            "conv.x_stride: expected at least 1024, got 1020");
  EXPECT_THAT(refusal(m, [&](P& p) { p.conv.bias += 2; }), HasSubstr("conv.bias: expected 16"));
  EXPECT_THAT(refusal(m, [](P& p) { p.gates.max = -1; }), HasSubstr("gates.max:"));
  EXPECT_THAT(refusal(g, [](P& p) { p.gates.decay = nullptr; }), HasSubstr("gates.decay:"));
  EXPECT_EQ(refusal(k, [](P& p) { p.gates.decay = p.gates.a = nullptr; }), "no error");
  EXPECT_THAT(refusal(k, [](P& p) { p.gate = nullptr; }), HasSubstr("gate: expected memory"));
  EXPECT_THAT(refusal(k, [](P& p) { p.gates.stride = 1; }), HasSubstr("gates.stride:"));
  EXPECT_EQ(refusal(g, [](P& p) { p.norm.group_dim = 24; }),
            "norm.group_dim: expected a divisor of HV V = 512, got 24");
  EXPECT_THAT(refusal(g, [&](P& p) { p.norm.z = byte(p.norm.z); }), HasSubstr("norm.z:"));
  EXPECT_EQ(refusal(g, [](P& p) { p.projected_dtype = DType::kFloat16; }),
            "projected_dtype: expected float32 or activation_dtype = bfloat16, got float16");
  EXPECT_THAT(refusal(g, [](P& p) { p.y = nullptr; }), HasSubstr("y: expected memory"));
  EXPECT_EQ(refusal(m, [](P& p) { p.projected_dtype = DType::kBFloat16; }),
            "projected_dtype: expected float32, got bfloat16");
  EXPECT_EQ(refusal(m, [](P& p) { p.tokens = 1; }), "tokens: expected at least 2, got 1");
}

}  // namespace
}  // namespace replayssm::testing
