// The recurrence over prompts on the device: the CPU's tests of it, and that its states are those
// of conventional steps.
#include "ops/cuda/recurrent_prefill.h"

#include "ops/cuda/device_rows.h"
#include "ops/cuda/harness.h"
#include "ops/read_copy_check.h"

namespace replayssm::testing {
namespace {

std::vector<std::vector<float>> prefill(const Case& c, Pool& pool,
                                        const std::vector<Window>& windows, bool graph = false) {
  DevicePool device(pool);
  const DeviceCall call(c, pool, device, windows);
  RecurrentPrefillParams p;
  static_cast<RecurrentStepParams&>(p) = call.p;
  run_call([&](cudaStream_t stream) { cuda::recurrent_prefill(p, stream); }, graph);
  device.download();
  std::vector<std::vector<float>> outputs;
  for (size_t w = 0; w < windows.size(); ++w) outputs.push_back(call.outputs(w));
  return outputs;
}

class CudaRecurrentPrefill : public ::testing::TestWithParam<Case> {};

// Those of the CPU and the device's, which have copies, and more of Kimi Delta in chunks.
std::vector<Case> prefill_cases() {
  constexpr auto k = Family::kKimiDelta;
  constexpr auto f32 = DType::kFloat32, b16 = DType::kBFloat16, f16 = DType::kFloat16;
  std::vector<Case> list = cases_with_copies();
  list.insert(list.end(), device_cases().begin(), device_cases().end());
  list.push_back({{k, 4, 2, 64, 128}, b16, f32, b16, true, -5.0f});
  list.push_back({{k, 2, 1, 128, 128}, b16, f32, f32, false, -5.0f, DType::kInt8});
  list.push_back({{k, 2, 2, 64, 128}, b16, b16, f32, true});
  list.push_back({{k, 2, 2, 128, 128}, b16, f16, f16, false, 0, f16});
  return list;
}
INSTANTIATE_TEST_SUITE_P(Shapes, CudaRecurrentPrefill, ::testing::ValuesIn(prefill_cases()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

double state_tolerance_of(const Case& c) { return 4 * state_tolerance(c); }
double output_tolerance_of(const Case& c) { return 4 * output_tolerance(c); }

TEST_P(CudaRecurrentPrefill, MatchesTheDefinitionAtAnyLength) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  for (const int64_t tokens : {1, 15, 17, 33, 64, 65, 130}) {
    const auto in = random_inputs(c, tokens, 20);
    const auto want = expected(c, in, tokens);
    Pool pool(c, {}, 2);
    pool.clear(1);
    const auto o = prefill(c, pool, {{&in, 0, tokens, 1, {}}})[0];
    EXPECT_LT(relative_error(o, want.o), output_tolerance_of(c)) << name(c) << " n=" << tokens;
    EXPECT_LT(relative_error(pool.slot_values(1), want.state), state_tolerance_of(c))
        << name(c) << " n=" << tokens;
    EXPECT_TRUE(pool.untouched(0));
    if (c.read_copy && c.checkpoint == DType::kFloat32) expect_copy_of_checkpoint(c, pool, 1);
  }
}

// Prompts in parts, decode steps in between.
TEST_P(CudaRecurrentPrefill, ContinuesWhereStepsAndPrefillsLeftOff) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  if (c.shape.state_dim != 128 || c.shape.head_dim % 8 != 0) return;
  if (c.read_copy && dtype_bytes(*c.read_copy) > 1) return;
  if (c.read_copy && c.activation == DType::kFloat32) return;
  const int64_t tokens = 100;
  const auto in = random_inputs(c, tokens, 21);
  const auto want = expected(c, in, tokens);
  Pool pool(c, {.buffer_len = 4}, 1);
  pool.clear(0);
  std::vector<float> o;
  const auto take = [&](int64_t begin, int64_t end) {
    const auto part = prefill(c, pool, {{&in, begin, end, 0, {}}})[0];
    o.insert(o.end(), part.begin(), part.end());
    commit_prefill(pool.cursors[0], end - begin, pool.ring());
  };
  take(0, 37);
  take(37, 70);
  const auto steps = decode(c, pool, Route::kOutputOnly, in, 70, 81, 1);
  o.insert(o.end(), steps.begin(), steps.end());
  fold(c, pool, 0);
  take(81, 100);
  EXPECT_LT(relative_error(o, want.o), output_tolerance_of(c) + copy_tolerance(c)) << name(c);
  EXPECT_LT(relative_error(pool.slot_values(0), want.state), state_tolerance_of(c)) << name(c);
}

// Whether prompts are taken in chunks of matrix products.
bool in_chunks(const Case& c) {
  const int64_t dim = c.shape.head_dim;
  return c.shape.state_dim == 128 && c.activation == DType::kBFloat16 &&
         (dim == 64 || dim == 128 || (dim == 80 && c.shape.family == Family::kMamba2));
}

// Token by token and with an fp32 state, the bits are those of one conventional step after another.
TEST_P(CudaRecurrentPrefill, HasTheBitsOfConventionalSteps) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  if (c.shape.state_dim != 128 || c.shape.head_dim % 8 != 0) return;
  if (c.checkpoint != DType::kFloat32 || in_chunks(c)) return;
  const auto in = random_inputs(c, 40, 25);
  Pool pool(c, {}, 1);
  pool.clear(0);
  prefill(c, pool, {{&in, 0, 40, 0, {}}});
  EXPECT_TRUE(pool.checkpoint.bytes == conventional_checkpoint(c, in, 40)) << name(c);
}

TEST_P(CudaRecurrentPrefill, NeighboursChangeNoBit) {
  REQUIRE_DEVICE();
  const Case c = GetParam();
  const auto a = random_inputs(c, 70, 22), b = random_inputs(c, 33, 23);
  const auto [contents, single] = same_in_every_run([&](bool graph) {
    Pool alone(c, {}, 1);
    alone.clear(0);
    const auto o = prefill(c, alone, {{&a, 0, 70, 0, {}}}, graph)[0];
    return std::pair(alone.contents(0), o);
  });
  Pool together(c, {}, 4);
  together.clear(2);
  together.clear(3);
  const auto batch = prefill(
      c, together, {{&b, 0, 33, 2, {}}, {&a, 0, 5, -1, {}}, {&a, 0, 70, 3, {}}, {&b, 0, 0, 1, {}}});
  EXPECT_EQ(single, batch[2]) << name(c);
  EXPECT_EQ(contents, together.contents(3)) << name(c);
  EXPECT_EQ(std::ranges::count(batch[1], 0.0f), static_cast<int64_t>(batch[1].size()));
  EXPECT_TRUE(together.untouched(0) && together.untouched(1));
}

TEST(CudaRecurrentPrefillExtremes, StrongDecayStaysFiniteAndRight) {
  REQUIRE_DEVICE();
  constexpr auto m = Family::kMamba2, g = Family::kGatedDelta, k = Family::kKimiDelta;
  constexpr auto f32 = DType::kFloat32, b16 = DType::kBFloat16;
  for (const Case& c : {Case{{m, 2, 1, 8, 64}}, Case{{g, 2, 1, 8, 64}}, Case{{k, 2, 1, 8, 64}},
                        Case{{m, 2, 1, 64, 128}, b16}, Case{{m, 2, 2, 128, 128}, b16},
                        Case{{g, 2, 1, 64, 128}, b16}, Case{{g, 2, 2, 128, 128}, b16},
                        Case{{k, 2, 1, 64, 128}, b16}, Case{{k, 2, 2, 128, 128}, b16},
                        Case{{k, 2, 1, 64, 128}, b16, f32, f32, false, -5.0f}}) {
    auto in = random_inputs(c, 130, 24);
    for (size_t i = 0; i < in.g.size(); ++i) in.g[i] = i % 5 == 0 ? -1e4f : i % 5 == 1 ? 0 : -1.0f;
    // Of Kimi Delta's heads: nothing is left, nothing fades, 1e-30 and less is left.
    constexpr float kGates[] = {0x1p17f, -150, 688, 5, 5};
    for (size_t i = 0; i < in.gate.size(); ++i) in.gate[i] = kGates[i % 5];
    const auto want = expected(c, in, 130);
    Pool pool(c, {}, 1);
    pool.clear(0);
    const auto o = prefill(c, pool, {{&in, 0, 130, 0, {}}})[0];
    EXPECT_LT(relative_error(o, want.o), output_tolerance_of(c)) << name(c);
  }
}

// Every token writes over what the one before it has written: what a chunk solves is far from the
// identity.
TEST(CudaRecurrentPrefillExtremes, NearlyEqualKeysOfFullStrengthAreRight) {
  REQUIRE_DEVICE();
  for (const auto& [family, dim] : {std::pair(Family::kGatedDelta, 64),
                                    {Family::kGatedDelta, 128},
                                    {Family::kKimiDelta, 64},
                                    {Family::kKimiDelta, 128}}) {
    const Case c{{family, 2, 1, dim, 128}, DType::kBFloat16};
    auto in = random_inputs(c, 130, 26);
    for (size_t i = c.shape.state_dim; i < in.k.size(); ++i)
      in.k[i] = rounded<bf16>(in.k[i % c.shape.state_dim] + (i % 7 == 0 ? 0.03125f : 0) * in.k[i]);
    in.b.assign(in.b.size(), 1.0f);
    in.g.assign(in.g.size(), -1e-4f);
    in.gate.assign(in.gate.size(), -7.0f);
    const auto want = expected(c, in, 130);
    Pool pool(c, {}, 1);
    pool.clear(0);
    const auto o = prefill(c, pool, {{&in, 0, 130, 0, {}}})[0];
    // What 64 tokens write cancels but for the last: parts of 16 bits leave that much of each.
    EXPECT_LT(relative_error(o, want.o), std::sqrt(2 * 64.0) * 0x1p-17) << name(c);
    // Keys times decays are such parts too: what they lack lies beside the keys that write later
    // and stays, of all tokens.
    EXPECT_LT(relative_error(pool.slot_values(0), want.state),
              c.kimi() ? std::sqrt(2 * 130.0) * 0x1p-17 : state_tolerance_of(c))
        << name(c);
  }
}

TEST(CudaRecurrentPrefillContracts, WrongArgumentsAreNamed) {
  alignas(16) float data[16];
  int32_t slot = 0;
  RecurrentPrefillParams p;
  p.shape = {.heads = 1, .key_heads = 1, .head_dim = 4, .state_dim = 4};
  p.batch = {1, &slot, &slot, reinterpret_cast<const Cursor*>(data), {}};
  p.state.checkpoint = data;
  p.v = p.k = p.q = data;
  p.v_stride = p.k_stride = p.q_stride = 4;
  p.b = p.g = data;
  p.o = data;
  p.batch.parent = &slot;
  EXPECT_EQ(error_of([&] { cuda::recurrent_prefill(p, nullptr); }),
            "batch.parent: expected null for a prefill, got a pointer");
  p.batch.parent = nullptr;
  p.o = nullptr;
  EXPECT_EQ(error_of([&] { cuda::recurrent_prefill(p, nullptr); }),
            "o: expected memory, got a null pointer");
}

}  // namespace
}  // namespace replayssm::testing
