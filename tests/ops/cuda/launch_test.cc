// The choice of launch configurations, without a device.
#include "ops/cuda/launch.h"

#include <gtest/gtest.h>

#include "ops/cuda/launch_table.h"
#include "ops/cuda/recurrent.h"

namespace replayssm::cuda {
namespace {

constexpr Device kH200{.multiprocessors = 132, .shared_bytes_per_block = 227 * 1024};

StepDescription step(RecurrentShape shape, int64_t sequences, DType read = DType::kFloat32) {
  return {.shape = shape, .ring = {}, .types = {.read = read}, .sequences = sequences};
}

const RecurrentShape kShapes[] = {
    {Family::kMamba2, 128, 8, 64, 128},     {Family::kMamba2, 96, 8, 80, 128},
    {Family::kMamba2, 5, 5, 8, 128},        {Family::kGatedDelta, 32, 16, 128, 128},
    {Family::kGatedDelta, 2, 1, 24, 128},   {Family::kKimiDelta, 32, 32, 128, 128},
    {Family::kKimiDelta, 1, 1, 8 * 9, 128},
};

TEST(ChooseLaunch, CutsEveryShapeEvenly) {
  for (const auto& shape : kShapes) {
    for (const int64_t sequences : {0, 1, 2, 7, 32, 128, 256, 1024}) {
      const auto config = choose_launch(step(shape, sequences), kH200);
      SCOPED_TRACE(to_string(config));
      EXPECT_EQ(shape.heads / shape.key_heads % config.heads, 0);
      EXPECT_EQ(shape.head_dim % (config.slices * kPassRows), 0);
      EXPECT_TRUE(config.heads == 1 || config.slices == 1);
      EXPECT_GE(config.warps, 1);
      EXPECT_LE(config.warps, kMaxWarps);
    }
  }
}

TEST(ChooseLaunch, FillsTheChipWithOneSequence) {
  const RecurrentShape gdn{Family::kGatedDelta, 32, 16, 128, 128};
  const auto config = choose_launch(step(gdn, 1), kH200);
  EXPECT_GE(gdn.heads * config.slices, 128);
}

// Kimi Delta's walk and states of 8 bits leave a large batch's blocks waiting for themselves.
TEST(ChooseLaunch, PreparesLargeBatchesWhereItPays) {
  constexpr auto kFp8 = DType::kFloat8E4M3;
  const auto& mamba = kShapes[0];
  const auto& gdn = kShapes[3];
  const auto& kda = kShapes[5];
  const auto preparing = [](StepDescription step) {
    step.types.activation = DType::kBFloat16;
    return choose_launch(step, kH200).preparing;
  };
  EXPECT_EQ(preparing(step(kda, 256)), 1);
  EXPECT_EQ(preparing(step(kda, 64)), 0);
  EXPECT_EQ(preparing(step(mamba, 256, kFp8)), 1);
  EXPECT_EQ(preparing(step(mamba, 32, kFp8)), 0);
  EXPECT_EQ(preparing(step(mamba, 256)), 0);
  EXPECT_EQ(preparing(step(kShapes[1], 256, kFp8)), 0);  // heads of 80
  EXPECT_EQ(preparing(step(gdn, 256, kFp8)), 0);
  StepDescription windows = step(kda, 256);
  windows.ring.max_window = 5;
  EXPECT_EQ(preparing(windows), 0);
  StepDescription conventional = step(kda, 256);
  conventional.replays = false;
  EXPECT_EQ(preparing(conventional), 0);
}

LaunchConfig chosen(StepDescription step, int32_t max_window = 1) {
  step.types.activation = DType::kBFloat16;
  step.ring.max_window = max_window;
  return choose_launch(step, kH200);
}
StepDescription of_sixteen_bits(const RecurrentShape& shape, int64_t sequences) {
  StepDescription s = step(shape, sequences, DType::kBFloat16);
  s.types.checkpoint = DType::kBFloat16;
  return s;
}

// The recurrence itself, while the kernel before runs, costs a small grid nothing.
TEST(ChooseLaunch, RunsAheadInSmallBatches) {
  for (const int i : {0, 1, 3, 5}) EXPECT_TRUE(chosen(step(kShapes[i], 1)).ahead) << i;
  const auto& gdn = kShapes[3];
  EXPECT_TRUE(chosen(step(gdn, 4)).ahead);
  EXPECT_FALSE(chosen(step(gdn, 8)).ahead);
  StepDescription behind_product = step(gdn, 1);
  behind_product.has_room = false;
  EXPECT_FALSE(chosen(behind_product).ahead);
  EXPECT_TRUE(chosen(of_sixteen_bits(gdn, 2)).ahead);
  EXPECT_TRUE(chosen(step(gdn, 2), 5).ahead);
  EXPECT_FALSE(chosen(step(gdn, 8), 5).ahead);
  EXPECT_FALSE(chosen(of_sixteen_bits(gdn, 1), 5).ahead);  // folds on the tensor cores
  StepDescription conventional = step(gdn, 1);
  conventional.replays = false;
  EXPECT_FALSE(chosen(conventional).ahead);
}

// As long as the chip has room for more blocks than there are.
TEST(ChooseLaunch, SharesFoldsInBatchesOfSomeTens) {
  const auto& gdn = kShapes[3];
  EXPECT_EQ(chosen(step(gdn, 1)).fold_blocks, 1);
  EXPECT_EQ(chosen(step(gdn, 8)).fold_blocks, 8);
  EXPECT_EQ(chosen(step(gdn, 32)).fold_blocks, 2);
  EXPECT_EQ(chosen(step(gdn, 256)).fold_blocks, 1);
  EXPECT_EQ(chosen(step(gdn, 8), 5).fold_blocks, 2);
  EXPECT_EQ(chosen(step(kShapes[1], 8)).fold_blocks, 2);
  EXPECT_EQ(chosen(of_sixteen_bits(kShapes[0], 8)).fold_blocks, 1);
  EXPECT_EQ(chosen(step(kShapes[0], 8), 5).fold_blocks, 1);
  StepDescription conventional = step(gdn, 8);
  conventional.replays = false;
  EXPECT_EQ(chosen(conventional).fold_blocks, 1);
}

TEST(ChooseLaunch, IsAFunctionOfItsArguments) {
  for (const auto& shape : kShapes)
    EXPECT_EQ(choose_launch(step(shape, 64), kH200), choose_launch(step(shape, 64), kH200));
}

TEST(LaunchConfig, IsPrintable) {
  EXPECT_EQ(to_string(LaunchConfig{.heads = 2, .slices = 1, .warps = 4, .preparing = 1}),
            "heads=2 slices=1 warps=4 preparing=1 ahead=0 fold_blocks=1");
}

TEST(LaunchTable, GivesTheNearestOfTheSameKind) {
  const auto entry = [](RecurrentShape shape, DType read, int64_t sequences, int heads) {
    return TunedLaunch{132, shape, {.read = read}, 1, sequences, {.heads = heads}};
  };
  const TunedLaunch table[] = {
      entry(kShapes[0], DType::kFloat32, 8, 1), entry(kShapes[0], DType::kFloat32, 32, 2),
      entry(kShapes[0], DType::kFloat8E4M3, 8, 4), entry(kShapes[3], DType::kFloat32, 8, 8)};
  const auto found = [&](const StepDescription& step, const Device& device) {
    const TunedLaunch* tuned = find_tuned(table, step, device);
    return tuned ? tuned->config.heads : 0;
  };
  EXPECT_EQ(found(step(kShapes[0], 8), kH200), 1);
  EXPECT_EQ(found(step(kShapes[0], 12), kH200), 1);
  EXPECT_EQ(found(step(kShapes[0], 13), kH200), 0);
  EXPECT_EQ(found(step(kShapes[0], 22), kH200), 2);
  EXPECT_EQ(found(step(kShapes[0], 48), kH200), 2);
  EXPECT_EQ(found(step(kShapes[0], 49), kH200), 0);
  EXPECT_EQ(found(step(kShapes[0], 0), kH200), 0);
  EXPECT_EQ(found(step(kShapes[0], 9, DType::kFloat8E4M3), kH200), 4);
  EXPECT_EQ(found(step(kShapes[3], 9), kH200), 8);
  EXPECT_EQ(found(step(kShapes[1], 8), kH200), 0);
  EXPECT_EQ(found(step(kShapes[0], 8), {108, kH200.shared_bytes_per_block}), 0);
  auto window = step(kShapes[0], 8);
  window.ring.max_window = 5;
  EXPECT_EQ(found(window, kH200), 0);
}

// The table that is compiled in: each entry is chosen where it was measured.
TEST(LaunchTable, IsUsed) {
  EXPECT_FALSE(launch_table().empty());
  for (const TunedLaunch& entry : launch_table()) {
    SCOPED_TRACE(to_string(entry.config));
    const StepDescription measured{.shape = entry.shape,
                                   .ring = {.max_window = entry.max_window},
                                   .types = entry.types,
                                   .sequences = entry.sequences};
    const Device device{entry.multiprocessors, kH200.shared_bytes_per_block};
    EXPECT_EQ(choose_launch(measured, device), entry.config);
  }
}

TEST(Workspace, IsThatOfStepsThatArePrepared) {
  RecurrentStepParams params;
  params.shape = kShapes[5];
  params.batch.sequences = 256;
  params.state.activation_dtype = DType::kBFloat16;
  const auto bytes = [&](auto&& change) {
    RecurrentStepParams p = params;
    change(p);
    return recurrent_workspace_bytes(p, kH200);
  };
  EXPECT_GE(bytes([](auto&) {}), 256 * 32 * (128 + 128) * 4);  // outputs and targets
  EXPECT_EQ(bytes([](auto& p) { p.batch.sequences = 8; }), 0);
  EXPECT_EQ(bytes([](auto& p) { p.route = Route::kConventional; }), 0);
  EXPECT_EQ(bytes([](auto& p) { p.route = Route::kStateAndOutput; }), 0);
  EXPECT_EQ(bytes([](auto& p) { p.batch.ring.buffer_len = 17; }), 0);
  EXPECT_EQ(bytes([](auto& p) { p.batch.ring.max_window = 2; }), 0);
  EXPECT_EQ(bytes([](auto& p) { p.shape.head_dim = 64; }), 0);
  EXPECT_EQ(bytes([](auto& p) { p.state.activation_dtype = DType::kFloat32; }), 0);
  EXPECT_EQ(bytes([](auto& p) { p.shape = kShapes[3]; }), 0);
}

// All else is the general kernel's.
TEST(StepKernel, TakesWhatItIsMadeFor) {
  RecurrentStepParams params;
  params.shape = kShapes[0];
  params.batch.sequences = 8;
  params.state.activation_dtype = DType::kBFloat16;
  alignas(16) static char memory[32];
  const auto takes = [&](auto&& change) {
    RecurrentStepParams p = params;
    change(p);
    return step_kernel_config(p, kH200).has_value();
  };
  EXPECT_TRUE(takes([](auto&) {}));
  EXPECT_FALSE(takes([](auto& p) { p.shape.state_dim = 64; }));
  EXPECT_FALSE(takes([](auto& p) { p.shape.head_dim = 20; }));
  EXPECT_TRUE(takes([](auto& p) { p.batch.ring.max_window = 16; }));
  EXPECT_FALSE(takes([](auto& p) { p.batch.ring.max_window = 17; }));
  EXPECT_FALSE(takes([](auto& p) { p.batch.ring.buffer_len = 4000; }));
  EXPECT_FALSE(takes([](auto& p) { p.v = memory + 8; }));
  EXPECT_FALSE(takes([](auto& p) { p.k_stride = 4; }));
  EXPECT_TRUE(takes([](auto& p) { p.state.read_copy = {memory, nullptr, DType::kInt8}; }));
  EXPECT_FALSE(takes([](auto& p) { p.state.read_copy = {memory, nullptr, DType::kFloat16}; }));
  EXPECT_FALSE(takes([](auto& p) {
    p.state.read_copy = {memory, nullptr, DType::kInt8};
    p.state.activation_dtype = DType::kFloat32;
  }));
  const uint64_t seed = 1;
  EXPECT_TRUE(takes([&](auto& p) { p.rounding.seed = &seed; }));
  EXPECT_FALSE(takes([&](auto& p) {
    p.rounding.seed = &seed;
    p.state.checkpoint_dtype = DType::kBFloat16;
  }));
}

TEST(FastDivide, AgreesWithDivision) {
  for (const uint32_t divisor : {1u, 2u, 3u, 5u, 7u, 16u, 17u, 21u, 33u, 255u, 1000u, 65535u}) {
    const FastDivide by(divisor);
    for (uint64_t x = 1; x < UINT64_MAX / 3; x *= 3) {
      for (const uint64_t y : {x - 1, x, x + 1, ~x}) {
        const auto low = static_cast<uint32_t>(y);
        EXPECT_EQ(by.divide(low), low / divisor) << low << " / " << divisor;
        EXPECT_EQ(by.modulo(low), low % divisor) << low << " % " << divisor;
        EXPECT_EQ(by.modulo64(y), y % divisor) << y << " % " << divisor;
      }
    }
  }
}

}  // namespace
}  // namespace replayssm::cuda
