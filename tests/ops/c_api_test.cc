// The C interface beside the C++ one, bit for bit, and what it says of mistakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <memory>
#include <string>

#include "ops/cpu/slots.h"
#include "ops/recurrent_harness.h"
#include "replay/bytes.h"
#include "replay/cursors.h"
#include "replayssm/replayssm.h"

namespace replayssm::testing {
namespace {

using ::testing::HasSubstr;

using ContextPointer = std::unique_ptr<replayssm_context, decltype(&replayssm_destroy)>;

ContextPointer make_context(int32_t threads = 2) {
  replayssm_context* context = nullptr;
  EXPECT_EQ(replayssm_cpu_create(threads, &context), REPLAYSSM_OK);
  return {context, replayssm_destroy};
}

template <class To, class From>
To twin(const From& from) {
  return std::bit_cast<To>(from);
}

class CApi : public ::testing::TestWithParam<Case> {
 protected:
  void expect_ok(replayssm_status status) {
    EXPECT_EQ(status, REPLAYSSM_OK) << replayssm_last_error(context_.get());
  }
  replayssm_step_params step_params(const Call& call) {
    return twin<replayssm_step_params>(static_cast<const RecurrentStepParams&>(call.p));
  }
  template <class Params>
  replayssm_slots slots(const Params& p) {
    return {twin<replayssm_shape>(p.shape), twin<replayssm_batch>(p.batch),
            twin<replayssm_state>(p.state), p.conv_inputs, p.channels};
  }

  ThreadPool threads_{2};
  ContextPointer context_ = make_context();
};

std::vector<Case> some_cases() {
  std::vector<Case> some;
  for (size_t i = 0; i < cases().size(); i += 4) some.push_back(cases()[i]);
  return some;
}

INSTANTIATE_TEST_SUITE_P(Shapes, CApi, ::testing::ValuesIn(some_cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

constexpr RingConfig kRing{.buffer_len = 6, .max_window = 3};

TEST_P(CApi, DoesWhatTheLibraryDoes) {
  const Case c = GetParam();
  const auto in = random_inputs(c, 40, 2);
  Pool pool(c, kRing, 3);
  pool.clear(1);
  Pool other = pool;
  const auto window = [&](int64_t begin, int64_t end) {
    return std::vector<Window>{{&in, begin, end, 1, {}}, {&in, 0, 1, -1, {}}};
  };
  {
    const auto want = run(c, pool, Op::kPrefill, Route::kOutputOnly, window(0, 9), threads_);
    commit_prefill(pool.cursors[1], 9, kRing);
    Call call(c, other, window(0, 9), 1);
    const auto p = step_params(call);
    expect_ok(replayssm_recurrent_prefill(context_.get(), &p));
    replayssm_commit_prefills(2, p.batch.slot, p.batch.query_start, &p.batch.ring,
                              reinterpret_cast<replayssm_cursor*>(other.cursors.data()));
    EXPECT_EQ(call.outputs(0), want[0]);
  }
  for (int64_t t = 9; t + 3 <= 40; t += 2) {
    const auto want = run(c, pool, Op::kStep, Route::kOutputOnly, window(t, t + 3), threads_);
    commit_step(pool.cursors[1], 2, Route::kOutputOnly);
    Call call(c, other, window(t, t + 3), 1);
    const auto p = step_params(call);
    auto* cursors = reinterpret_cast<replayssm_cursor*>(other.cursors.data());
    replayssm_begin_steps(2, p.batch.slot, p.batch.query_start, &p.batch.ring, cursors);
    expect_ok(replayssm_check_batch(context_.get(), &p.batch, 3));
    call.p.route = Route::kOutputOnly;
    const auto step = step_params(call);
    expect_ok(replayssm_recurrent_step(context_.get(), &step));
    const int32_t accepted[] = {2, 0};
    replayssm_commit_steps(2, p.batch.slot, accepted, REPLAYSSM_OUTPUT_ONLY, cursors);
    EXPECT_EQ(call.outputs(0), want[0]);
    EXPECT_EQ(call.outputs(1), want[1]);
  }
  EXPECT_EQ(pool.contents(1), other.contents(1));

  fold(c, pool, 1, threads_, 2);
  RecurrentFoldParams f;
  const int32_t slot = 1, target = 2;
  f.shape = c.shape;
  f.batch = {1, nullptr, &slot, other.cursors.data(), kRing};
  f.state = other.state();
  f.channel_gate = other.channel_gate();
  f.rounding = other.rounding();
  f.target_slot = &target;
  const auto p = twin<replayssm_fold_params>(f);
  expect_ok(replayssm_recurrent_fold(context_.get(), &p));
  replayssm_commit_folds(1, &slot, &target,
                         reinterpret_cast<replayssm_cursor*>(other.cursors.data()));
  EXPECT_EQ(pool.contents(2), other.contents(2));
  EXPECT_EQ(pool.cursors[2].ring_start, other.cursors[2].ring_start);
}

TEST_P(CApi, MovesSlots) {
  const Case c = GetParam();
  Pool pool(c, kRing, 3);
  std::mt19937 random(3);
  for (PoolArray* array : pool.arrays()) {
    for (uint8_t& byte : array->bytes) byte = static_cast<uint8_t>(random());
  }
  const int32_t slot = 0, target = 2, query_start[] = {0, 3}, path[] = {1, 2, -1}, accepted = 2;
  SlotClearParams p;
  p.shape = c.shape;
  p.batch = {1, query_start, &slot, pool.cursors.data(), kRing};
  p.state = pool.state();
  const replayssm_slots arguments = slots(p);

  Pool want = pool;
  for (PoolArray* array : want.arrays()) std::ranges::copy(array->slot(0), array->slot(2).begin());
  expect_ok(replayssm_slot_copy(context_.get(), &arguments, &target));
  replayssm_copy_cursors(1, &slot, &target,
                         reinterpret_cast<replayssm_cursor*>(pool.cursors.data()));
  EXPECT_EQ(pool.contents(2), want.contents(2));
  want.move_rows(0, {1, 2});
  expect_ok(replayssm_compact(context_.get(), &arguments, path, &accepted));
  EXPECT_EQ(pool.contents(0), want.contents(0));
  expect_ok(replayssm_slot_clear(context_.get(), &arguments));
  EXPECT_TRUE(std::ranges::all_of(pool.slot(0), [](uint8_t byte) { return byte == 0; }));
  EXPECT_EQ(pool.contents(1), want.contents(1));
}

TEST_P(CApi, TakesSnapshots) {
  const Case c = GetParam();
  const auto in = random_inputs(c, 3, 2);
  Pool pool(c, kRing, 1);
  pool.clear(0);
  const auto bytes = static_cast<size_t>(3 * checkpoint_bytes(c.shape, c.checkpoint));
  std::vector<uint8_t> snapshots[2] = {std::vector<uint8_t>(bytes, 0xff),
                                       std::vector<uint8_t>(bytes, 0xff)};
  const int32_t source = -1;
  Call call(c, pool, {{&in, 0, 3, 0, {}}}, 2), other(c, pool, {{&in, 0, 3, 0, {}}}, 2);
  SnapshotStepParams p;
  static_cast<RecurrentStepParams&>(p) = call.p;
  p.snapshots = snapshots[0].data();
  p.source = &source;
  cpu::snapshot_step(p, call.workspace(), threads_);
  const auto arguments = step_params(other);
  expect_ok(replayssm_snapshot_step(context_.get(), &arguments, snapshots[1].data(), &source));
  EXPECT_EQ(snapshots[0], snapshots[1]);
  EXPECT_EQ(call.outputs(0), other.outputs(0));
}

TEST(CApiFunctions, ConvolutionAndGates) {
  const auto context = make_context();
  constexpr int64_t kChannels = 19, kTokens = 5, kHeads = 3;
  std::vector<float> x(kTokens * kChannels), weight(4 * kChannels, 0.5f);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  std::vector<float> inputs[2], y[2];
  const RingConfig ring{.max_window = 5};
  const Cursor cursor = reset_cursor(ring);
  const int32_t slot = 0, query_start[] = {0, 5};
  ThreadPool threads(2);
  for (int i = 0; i < 2; ++i) {
    inputs[i].resize(conv_rows(4, 5) * kChannels);
    y[i].resize(x.size());
    ConvParams p;
    p.batch = {1, query_start, &slot, &cursor, ring};
    p.channels = p.x_stride = kChannels;
    p.x = x.data();
    p.weight = weight.data();
    p.inputs = inputs[i].data();
    p.y = y[i].data();
    const auto c = twin<replayssm_conv_params>(p);
    if (i == 0) cpu::causal_conv(p, threads);
    if (i == 1) {
      EXPECT_EQ(replayssm_causal_conv(context.get(), &c), REPLAYSSM_OK);
    }
  }
  EXPECT_EQ(y[0], y[1]);
  EXPECT_EQ(inputs[0], inputs[1]);

  std::vector<float> b[2], g[2];
  const float bias[kHeads] = {0.1f, 0.2f, 0.3f}, a[kHeads] = {-1, -2, -3};
  for (int i = 0; i < 2; ++i) {
    b[i].resize(2 * kHeads);
    g[i].resize(2 * kHeads);
    Mamba2GateParams p{x.data(), 4, bias, a, 0.001f, 0.5f, 2, kHeads, b[i].data(), g[i].data()};
    const auto c = twin<replayssm_mamba2_gates_params>(p);
    if (i == 0) cpu::mamba2_gates(p, threads);
    if (i == 1) {
      EXPECT_EQ(replayssm_mamba2_gates(context.get(), &c), REPLAYSSM_OK);
    }
  }
  EXPECT_EQ(b[0], b[1]);
  EXPECT_EQ(g[0], g[1]);
  for (int i = 0; i < 2; ++i) {
    DeltaGateParams p{x.data(), x.data() + 30, 4, bias, a, 2, kHeads, b[i].data(), g[i].data()};
    const auto c = twin<replayssm_delta_gates_params>(p);
    if (i == 0) cpu::delta_gates(p, threads);
    if (i == 1) {
      EXPECT_EQ(replayssm_delta_gates(context.get(), &c), REPLAYSSM_OK);
    }
  }
  EXPECT_EQ(b[0], b[1]);
  EXPECT_EQ(g[0], g[1]);
}

TEST(CApiFunctions, SizesAreThoseOfTheLibrary) {
  const auto context = make_context();
  const replayssm_shape shape{REPLAYSSM_KIMI_DELTA, 4, 2, 16, 32};
  const replayssm_ring_config ring{16, 5, 4};
  const RecurrentShape same{Family::kKimiDelta, 4, 2, 16, 32};
  EXPECT_EQ(replayssm_ring_rows(&ring), 21);
  EXPECT_EQ(replayssm_conv_rows(&ring), 8);
  EXPECT_EQ(replayssm_dtype_bytes(REPLAYSSM_BFLOAT16), 2);
  EXPECT_EQ(replayssm_checkpoint_bytes(&shape, REPLAYSSM_FLOAT16), 4 * 16 * 32 * 2);
  EXPECT_EQ(replayssm_read_copy_bytes(&shape, REPLAYSSM_INT8), 4 * 16 * 32 + 4 * 16 * 4);
  EXPECT_EQ(replayssm_ring_row_bytes(&shape, REPLAYSSM_BFLOAT16),
            ring_row_bytes(same, DType::kBFloat16));
  const int64_t bytes = replayssm_workspace_bytes(context.get(), &shape, &ring);
  EXPECT_EQ(bytes, cpu::recurrent_workspace_bytes(same, {16, 5, 4}, 2));
  EXPECT_EQ(replayssm_reserve(context.get(), &shape, &ring), REPLAYSSM_OK);
  EXPECT_STRNE(replayssm_version(), "");
}

TEST(CApiFunctions, MistakesAreNamedAndNothingIsThrown) {
  replayssm_context* none = nullptr;
  EXPECT_EQ(replayssm_cpu_create(-1, &none), REPLAYSSM_INVALID_ARGUMENT);
  EXPECT_EQ(replayssm_cpu_create(1, nullptr), REPLAYSSM_INVALID_ARGUMENT);
  EXPECT_EQ(none, nullptr);
  replayssm_destroy(nullptr);
  const replayssm_step_params zeros{};
  EXPECT_EQ(replayssm_recurrent_step(nullptr, &zeros), REPLAYSSM_INVALID_ARGUMENT);

  const auto context = make_context(1), other = make_context(1);
  EXPECT_STREQ(replayssm_last_error(context.get()), "");
  const auto refused = [&](replayssm_status status, const char* message) {
    EXPECT_EQ(status, REPLAYSSM_INVALID_ARGUMENT);
    EXPECT_THAT(replayssm_last_error(context.get()), HasSubstr(message));
  };
  refused(replayssm_recurrent_step(context.get(), nullptr), "null pointer");
  refused(replayssm_recurrent_step(context.get(), &zeros), "shape.heads: expected at least 1");
  replayssm_step_params p{};
  p.shape = {REPLAYSSM_MAMBA2, 2, 1, 4, 8};
  p.batch.ring = {4, 1, 4};
  p.batch.sequences = 1;
  refused(replayssm_recurrent_prefill(context.get(), &p), "batch.slot: expected memory");
  p.shape.family = 77;
  refused(replayssm_recurrent_prefill(context.get(), &p), "shape.family: expected");
  refused(replayssm_mamba2_gates(context.get(), nullptr), "null pointer");
  replayssm_delta_gates_params gates{};
  gates.tokens = gates.heads = 1;
  refused(replayssm_delta_gates(context.get(), &gates), "beta: expected memory");
  const int32_t query_start[] = {0, 1}, slot = 3;
  replayssm_cursor cursor{};
  const replayssm_batch batch{1, query_start, &slot, &cursor, {4, 1, 4}, nullptr, nullptr};
  refused(replayssm_check_batch(context.get(), &batch, 2),
          "batch.slot[0]: expected -1 or a slot below 2, got 3");
  const replayssm_shape huge{REPLAYSSM_MAMBA2, 1, 1, int64_t{1} << 44, 8};
  const replayssm_ring_config ring{4, 1, 4};
  EXPECT_EQ(replayssm_reserve(context.get(), &huge, &ring), REPLAYSSM_OUT_OF_MEMORY);
  EXPECT_STREQ(replayssm_last_error(context.get()), "out of memory");
  EXPECT_STREQ(replayssm_last_error(other.get()), "");
}

}  // namespace
}  // namespace replayssm::testing
