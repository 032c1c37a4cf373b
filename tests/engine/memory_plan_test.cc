#include "engine/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.h"
#include "engine/fake_model.h"
#include "engine/model_drafter.h"

namespace replayssm {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// The host's memory, as if it were a device's.
class LimitedMemory final : public Memory {
 public:
  MemoryCapacity limit;

  void* allocate(int64_t bytes) override { return host_memory().allocate(bytes); }
  void release(void* data, int64_t bytes) noexcept override { host_memory().release(data, bytes); }
  void zero(void* first, int64_t bytes, int64_t stride, int64_t count) override {
    host_memory().zero(first, bytes, stride, count);
  }
  void write(void* to, const void* host, int64_t bytes) override {
    host_memory().write(to, host, bytes);
  }
  void write_random(void* to, DType dtype, uint64_t first, int64_t count) override {
    host_memory().write_random(to, dtype, first, count);
  }
  void read(void* host, const void* from, int64_t bytes) override {
    host_memory().read(host, from, bytes);
  }
  void copy(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t bytes,
            int64_t count) override {
    host_memory().copy(to, to_stride, from, from_stride, bytes, count);
  }
  MemoryCapacity capacity() const override { return limit; }
};

class MemoryPlanTest : public ::testing::Test {
 protected:
  // A device with room for `states` sequences' states and `blocks` KV blocks behind what is used.
  MemoryPlan plan(int64_t states, int64_t blocks) {
    const ModelConfig& config = model_.config();
    const int64_t room = states * SlotPool::bytes_per_slot(config, options_.ring,
                                                           options_.state_dtype, DType::kFloat32) +
                         blocks * KvPool::bytes_per_block(config, DType::kFloat32);
    constexpr int64_t kUsed = 12345;
    memory_.limit.total = 2 * (kUsed + room);  // of which half may be used
    memory_.limit.free = memory_.limit.total - kUsed;
    model_.use_memory(memory_);
    return plan_memory(model_, options_);
  }

  testing::FakeModel model_;
  LimitedMemory memory_;
  EngineOptions options_{.max_num_seqs = 4, .max_model_len = 100, .memory_utilization = 0.5};
};

TEST_F(MemoryPlanTest, WithoutALimitAllSequencesCanBeFull) {
  const MemoryPlan plan = plan_memory(model_, options_);
  EXPECT_EQ(plan.total, 0);
  EXPECT_EQ(plan.kv_blocks, 4 * 4);  // 100 tokens in blocks of 32
}

TEST_F(MemoryPlanTest, TakesAsManyBlocksAsAreUsefulAndFit) {
  EXPECT_EQ(plan(4, 100).kv_blocks, 16);
  EXPECT_EQ(plan(4, 16).kv_blocks, 16);
  EXPECT_EQ(plan(4, 9).kv_blocks, 9);
  EXPECT_EQ(plan(4, 4).kv_blocks, 4);
  options_.kv_blocks = 7;
  EXPECT_EQ(plan(4, 9).kv_blocks, 7);
}

TEST_F(MemoryPlanTest, RefusesWhatDoesNotFitWithTheNumbers) {
  EXPECT_THAT([&] { plan(3, 0); },
              ThrowsMessage<Error>(HasSubstr("max_num_seqs: expected states that fit into")));
  EXPECT_THAT([&] { plan(4, 3); },
              ThrowsMessage<Error>(HasSubstr("max_model_len: expected KV blocks that fit into")));
  options_.kv_blocks = 10;
  EXPECT_THAT([&] { plan(4, 9); }, ThrowsMessage<Error>(HasSubstr("for 320 tokens")));
}

TEST_F(MemoryPlanTest, TheEngineHasWhatIsPlanned) {
  plan(4, 9);
  const Engine engine(model_, nullptr, options_);
  EXPECT_EQ(engine.memory_plan().kv_blocks, 9);
  EXPECT_EQ(engine.kv().blocks(), 9);
  EXPECT_THAT(to_string(engine.memory_plan()), HasSubstr("for 288 tokens"));
}

// A draft model shares the memory: its states and blocks are planned beside the model's.
TEST_F(MemoryPlanTest, ADraftModelHasItsPart) {
  testing::FakeModel draft_model;
  options_.speculative = SpeculativeConfig{.method = DraftMethod::kDraftModel, .tokens = 3};
  options_.draft_model = &draft_model;
  options_.ring.max_window = 4;
  const ModelConfig& config = draft_model.config();
  const int64_t states = 4 * SlotPool::bytes_per_slot(config, ModelDrafter::ring_of(options_),
                                                      DType::kFloat32, DType::kFloat32);
  EXPECT_EQ(plan_memory(model_, options_).draft_kv_blocks, 16);
  // Both models' states alike, and pairs of blocks: 12 pairs beside the states.
  const MemoryPlan both = plan(8, 24);
  EXPECT_EQ(both.draft_states, states);
  EXPECT_EQ(both.kv_blocks, 12);
  EXPECT_EQ(both.draft_kv_blocks, 12);
  EXPECT_THAT(to_string(both), HasSubstr("; draft model: weights "));
  EXPECT_THAT([&] { plan(7, 0); }, ThrowsMessage<Error>(HasSubstr("max_num_seqs: expected")));
  // The room is taken before there is a drafter that could fail.
  plan(8, 24);
  options_.ring.max_window = 1;
  const Engine engine(model_, nullptr, options_);
  EXPECT_EQ(engine.kv().blocks(), 12);
  EXPECT_EQ(draft_model.reserved.window, 4);
  options_.speculative->method = DraftMethod::kNgram;
  EXPECT_EQ(plan(4, 16).draft_states, 0);
}

}  // namespace
}  // namespace replayssm
