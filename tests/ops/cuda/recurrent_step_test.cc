// Decode steps on the device against the definition.
#include <gtest/gtest.h>

#include "ops/cuda/harness.h"

namespace replayssm::testing {
namespace {

class CudaStep : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Shapes, CudaStep, ::testing::ValuesIn(step_cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

TEST_P(CudaStep, EveryRouteMatchesTheReference) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const int64_t tokens = 40;
  const auto in = random_inputs(c, tokens, 1);
  const auto want = expected(c, in, tokens);
  for (const Route route : kRoutes) {
    for (const int32_t buffer_len : {1, 5, 16, 33}) {
      SCOPED_TRACE(name(c) + " " + route_name(route) + " B=" + std::to_string(buffer_len));
      Pool pool(c, {.buffer_len = buffer_len}, 1);
      pool.clear(0);
      const auto o = decode(c, pool, route, in, 0, tokens, 1);
      fold(c, pool, 0);
      EXPECT_LT(relative_error(o, want.o), output_tolerance(c) + copy_tolerance(c));
      EXPECT_LT(relative_error(pool.slot_values(0), want.state), state_tolerance(c));
    }
  }
}

// The accuracy promised for fp32 outputs on random inputs.
TEST_P(CudaStep, ReadoutErrorIsBelowOneMillionth) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  if (c.checkpoint != DType::kFloat32 || c.output != DType::kFloat32 || c.read_copy) return;
  const auto in = random_inputs(c, 48, 21);
  const auto want = expected(c, in, 48);
  for (const Route route : kRoutes) {
    Pool pool(c, {}, 1);
    pool.clear(0);
    EXPECT_LT(relative_error(decode(c, pool, route, in, 0, 48, 1), want.o), 1e-6)
        << name(c) << " " << route_name(route);
  }
}

// What 16-bit outputs lose is their rounding.
TEST(CudaStepOutputs, OfSixteenBitsAreAsGoodAsRoundedDoubles) {
  REQUIRE_DEVICE();
  for (const Family family : {Family::kMamba2, Family::kGatedDelta, Family::kKimiDelta}) {
    const Case c{{family, 4, 2, 64, 128}, DType::kBFloat16, DType::kFloat32, DType::kBFloat16};
    const auto in = random_inputs(c, 48, 22);
    const auto want = expected(c, in, 48);
    std::vector<double> nearest;
    for (const double o : want.o) nearest.push_back(rounded<bf16>(static_cast<float>(o)));
    for (const Route route : kRoutes) {
      Pool pool(c, {}, 1);
      pool.clear(0);
      EXPECT_LT(relative_error(decode(c, pool, route, in, 0, 48, 1), want.o),
                1.02 * relative_error(nearest, want.o))
          << name(c) << " " << route_name(route);
    }
  }
}

TEST_P(CudaStep, AnyFlushScheduleGivesTheConventionalState) {
  REQUIRE_DEVICE();
  Case c = GetParam();
  c.checkpoint = DType::kFloat32;
  const int64_t tokens = 40;
  const auto in = random_inputs(c, tokens, 2);
  const auto want = conventional_checkpoint(c, in, tokens);
  std::mt19937 random(3);
  for (int trial = 0; trial < 8; ++trial) {
    const RingConfig ring{.buffer_len = 1 + static_cast<int32_t>(random() % 20)};
    Pool pool(c, ring, 1);
    pool.clear(0);
    pool.cursors[0].ring_start += random() % 1000;  // any ring start
    pool.cursors[0].ring_limit = 1 + random() % ring.buffer_len;
    const Route route = kRoutes[1 + trial % 2];
    const cuda::LaunchConfig config{.heads = 1, .slices = 1, .warps = 1 << trial % 2};
    const auto cut = trial % 3 == 2 ? std::optional<cuda::LaunchConfig>{} : config;
    decode(c, pool, route, in, 0, tokens, 1, 0, cut);
    fold(c, pool, 0);
    EXPECT_EQ(pool.checkpoint.bytes, want)
        << name(c) << " B=" << ring.buffer_len << " " << route_name(route);
  }
}

TEST_P(CudaStep, NeighboursOrderAndLaunchChangeNoBit) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const int64_t tokens = 14;
  std::vector<Inputs> in;
  for (uint32_t s = 0; s < 4; ++s) in.push_back(random_inputs(c, tokens, 10 + s));
  const RingConfig ring{.buffer_len = 5};
  for (const Route route : kRoutes) {
    Pool alone(c, ring, 4), together(c, ring, 7);
    for (const int64_t slot : {0, 1, 2, 3}) alone.clear(slot);
    const int32_t slots[] = {5, 2, 6, 0};
    for (const int32_t slot : slots) together.clear(slot);
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<Window> rows;
      for (const int s : {2, 0, 3, 1}) rows.push_back({&in[s], t, t + 1, slots[s], {}});
      rows.insert(rows.begin() + 1, {&in[0], t, t + 1, -1, {}});  // padding
      rows.push_back({&in[1], t, t, 3, {}});                      // idle and poisoned
      // As is chosen, or cut otherwise: outputs of steps that run ahead have other bits.
      using Cut = std::optional<cuda::LaunchConfig>;
      const Cut wide = cuda::LaunchConfig{.warps = 2}, small = cuda::LaunchConfig{.warps = 1};
      const auto batch = run(c, together, route, rows, t % 2 ? wide : Cut{});
      EXPECT_EQ(std::ranges::count(batch[1], 0.0f), std::ssize(batch[1]));
      const int where[] = {2, 4, 0, 3};
      for (int s = 0; s < 4; ++s) {
        const auto single =
            run(c, alone, route, {{&in[s], t, t + 1, s, {}}}, t % 2 ? small : Cut{})[0];
        EXPECT_EQ(single, batch[where[s]]) << name(c) << " " << route_name(route) << " t=" << t;
        commit_step(alone.cursors[s], 1, route);
        commit_step(together.cursors[slots[s]], 1, route);
      }
    }
    for (int s = 0; s < 4; ++s) {
      EXPECT_TRUE(std::ranges::equal(alone.slot(s), together.slot(slots[s]))) << name(c);
      EXPECT_EQ(alone.contents(s), together.contents(slots[s])) << name(c);
    }
    for (const int64_t unused : {1, 3, 4}) EXPECT_TRUE(together.untouched(unused));
  }
}

// A captured step stays valid whatever flushes, and gives the bits of the eager one.
TEST_P(CudaStep, GraphReplayGivesTheEagerBits) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const RingConfig ring{.buffer_len = 3};
  Pool eager(c, ring, 2), graphed(c, ring, 2);
  for (const int slot : {0, 1}) eager.clear(slot), graphed.clear(slot);
  eager.cursors[1].ring_limit = graphed.cursors[1].ring_limit = 1;
  const auto in = random_inputs(c, 2, 6);
  const std::vector<Window> windows{{&in, 0, 1, 0, {}}, {&in, 1, 2, 1, {}}};
  const auto both = [&](Pool& pool, bool graph) {
    DevicePool device(pool);
    DeviceCall call(c, pool, device, windows);
    const DeviceArray<int32_t> accepted(std::vector<int32_t>{1, 1});
    cudaStream_t stream;
    cuda::check_cuda(cudaStreamCreate(&stream), "stream");
    const auto step = [&] {
      cuda::begin_steps(call.p.batch, device.cursors(), stream);
      cuda::recurrent_step(call.p, nullptr, cuda::current_device(), stream);
      cuda::commit_steps(call.p.batch, accepted.data(), call.p.route, device.cursors(), stream);
    };
    cudaGraph_t captured = nullptr;
    cudaGraphExec_t launchable = nullptr;
    if (graph) {
      cuda::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
      step();
      cuda::check_cuda(cudaStreamEndCapture(stream, &captured), "capture");
      cuda::check_cuda(cudaGraphInstantiate(&launchable, captured, 0), "instantiate");
    }
    std::vector<uint8_t> all;
    for (int i = 0; i < 10; ++i) {
      if (graph) {
        cuda::check_cuda(cudaGraphLaunch(launchable, stream), "launch");
      } else {
        step();
      }
      cuda::check_cuda(cudaStreamSynchronize(stream), "step");
      const auto bytes = call.output_bytes();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    if (graph) {
      cudaGraphExecDestroy(launchable);
      cudaGraphDestroy(captured);
    }
    cudaStreamDestroy(stream);
    device.download();
    return all;
  };
  EXPECT_EQ(both(eager, false), both(graphed, true)) << name(c);
  for (const int slot : {0, 1}) EXPECT_EQ(eager.contents(slot), graphed.contents(slot)) << name(c);
}

TEST_P(CudaStep, TheSameLaunchFiveTimes) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const auto in = random_inputs(c, 12, 8);
  Pool before(c, {.buffer_len = 4}, 1);
  before.clear(0);
  decode(c, before, Route::kOutputOnly, in, 0, 8, 1);
  for (int64_t t = 8; t < 10; ++t) {
    Pool first = before;
    const auto o = run(c, first, Route::kOutputOnly, {{&in, t, t + 1, 0, {}}});
    for (int i = 0; i < 4; ++i) {
      Pool again = before;
      EXPECT_EQ(run(c, again, Route::kOutputOnly, {{&in, t, t + 1, 0, {}}}), o) << name(c);
      EXPECT_EQ(again.contents(0), first.contents(0)) << name(c);
    }
    commit_step(first.cursors[0], 1, Route::kOutputOnly);
    before = first;
  }
}

// Near-collinear keys written with full strength, hardly any decay, and decays of 1e-30 between.
TEST(CudaStepExtremes, HardCasesStayAccurate) {
  REQUIRE_DEVICE();
  for (const Family family : {Family::kMamba2, Family::kGatedDelta, Family::kKimiDelta}) {
    for (const bool forgets : {false, true}) {
      const Case c{{family, 2, 1, 16, 128}, DType::kBFloat16};
      const int64_t tokens = 40, width = 128;
      auto in = random_inputs(c, tokens, 9);
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < width; ++i)
          in.k[t * width + i] = rounded<bf16>(in.k[i] + 0.02f * in.k[t * width + i]);
      for (float& b : in.b) b = 0.999f;
      for (size_t i = 0; i < in.g.size(); ++i) in.g[i] = forgets && i % 7 == 0 ? -69.0f : -1e-4f;
      for (size_t i = 0; i < in.gate.size(); ++i)
        in.gate[i] = forgets && i % 7 == 0 ? 340.0f : -8.0f;
      const auto want = expected(c, in, tokens);
      double conventional = 0;
      for (const Route route : kRoutes) {
        Pool pool(c, {.buffer_len = 16}, 1);
        pool.clear(0);
        // Two results may be twice as far apart as each may be from what is right.
        const auto o = decode(c, pool, route, in, 0, tokens, 1, 0, {}, 2 * 2e-5);
        const double error = relative_error(o, want.o);
        if (route == Route::kConventional) conventional = error;
        EXPECT_LT(error, 2e-5) << family_name(family) << " " << route_name(route) << forgets;
        EXPECT_LT(error, 4 * std::max(conventional, 1e-7))
            << family_name(family) << " " << route_name(route) << forgets;
      }
    }
  }
}

// A snapshot leaves its source alone and holds what a fold in place gives.
TEST_P(CudaStep, FoldIntoAnotherSlot) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const auto in = random_inputs(c, 9, 12);
  Pool pool(c, {}, 3);
  for (const int slot : {0, 1}) pool.clear(slot);
  decode(c, pool, Route::kOutputOnly, in, 0, 9, 1);
  const auto source = pool.contents(0);
  fold(c, pool, 0, 1);
  EXPECT_EQ(pool.contents(0), source) << name(c);
  fold(c, pool, 0);
  EXPECT_TRUE(std::ranges::equal(pool.slot(0), pool.slot(1))) << name(c);
  EXPECT_TRUE(pool.untouched(2));
  fold(c, pool, 0, -1);  // nobody's
  EXPECT_TRUE(pool.untouched(2));
  fold(c, pool, 0, 2);  // with nothing left to fold
  EXPECT_TRUE(std::ranges::equal(pool.slot(0), pool.slot(2))) << name(c);
}

}  // namespace
}  // namespace replayssm::testing
