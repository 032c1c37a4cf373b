#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "core/check.h"
#include "engine/fake_model.h"
#include "engine/kv_pool.h"
#include "engine/slot_pool.h"
#include "replay/cursor.h"

namespace replayssm {
namespace {

constexpr RingConfig kRing{.buffer_len = 3, .max_window = 2, .conv_kernel = 4};

// Every array of the pool, with the bytes of one slot in it, from the shapes in the headers.
std::vector<std::pair<std::byte*, int64_t>> arrays(const SlotPool& pool, const ModelConfig& config,
                                                   int64_t checkpoint, int64_t activation) {
  const Mamba2Config& m = config.mamba2;
  const int64_t rows = 3 + 2, conv = 3 + 2;  // max(3, 2) + 2 and 4 - 1 + 2
  std::vector<std::pair<std::byte*, int64_t>> result;
  const auto add = [&](void* data, int64_t bytes) {
    result.emplace_back(static_cast<std::byte*>(data), bytes);
  };
  for (const RecurrentState& state : pool.recurrent()) {
    add(state.checkpoint, m.heads * m.head_dim * m.state_dim * checkpoint);
    add(state.ring_v, rows * m.heads * m.head_dim * activation);
    add(state.ring_k, rows * m.groups * m.state_dim * activation);
    add(state.ring_b, rows * m.heads * 4);
    add(state.ring_g, rows * m.heads * 4);
  }
  for (void* inputs : pool.conv_inputs()) {
    add(inputs, conv * (m.heads * m.head_dim + 2 * m.groups * m.state_dim) * activation);
  }
  return result;
}

TEST(SlotPool, IsAsLargeAsItsShapesAndZeroedOnAcquire) {
  const testing::FakeModel model;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    SlotPool pool(model.config(), kRing, dtype, DType::kBFloat16, 3);
    const auto memory = arrays(pool, model.config(), dtype_bytes(dtype), 2);
    int64_t bytes = 0;
    for (const auto& [data, slot_bytes] : memory) bytes += slot_bytes;
    EXPECT_EQ(SlotPool::bytes_per_slot(model.config(), kRing, dtype, DType::kBFloat16), bytes);
    EXPECT_EQ(pool.bytes(), 3 * bytes);
    for (const auto& [data, slot_bytes] : memory) std::memset(data, 0xff, 3 * slot_bytes);
    const int32_t slot = pool.acquire();
    for (const auto& [data, slot_bytes] : memory) {
      for (int64_t i = 0; i < 3 * slot_bytes; ++i) {
        ASSERT_EQ(data[i], i / slot_bytes == slot ? std::byte{0} : std::byte{0xff});
      }
    }
  }
}

TEST(SlotPool, CountsAndZeroesReadCopies) {
  const testing::FakeModel model;
  const Mamba2Config& m = model.config().mamba2;
  const int64_t layers = model.config().recurrent_layers(), rows = m.heads * m.head_dim;
  const auto bytes = [&](std::optional<DType> read) {
    return SlotPool::bytes_per_slot(model.config(), kRing, DType::kFloat32, DType::kBFloat16, read);
  };
  for (const DType read : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kInt8}) {
    const bool narrow = dtype_bytes(read) == 1;
    EXPECT_EQ(bytes(read) - bytes({}),
              layers * rows * (m.state_dim * dtype_bytes(read) + (narrow ? 4 : 0)));
    SlotPool pool(model.config(), kRing, DType::kFloat32, DType::kBFloat16, 2, read);
    EXPECT_EQ(pool.bytes(), 2 * bytes(read));
    for (const RecurrentState& state : pool.recurrent()) {
      ASSERT_NE(state.read_copy.data, nullptr);
      EXPECT_EQ(state.read_copy.dtype, read);
      EXPECT_EQ(state.read_copy.scale != nullptr, narrow);
      std::memset(state.read_copy.data, 0xff, 2 * rows * m.state_dim * dtype_bytes(read));
    }
    ASSERT_EQ(pool.acquire(), 0);
    for (const RecurrentState& state : pool.recurrent()) {
      const auto* data = static_cast<const std::byte*>(state.read_copy.data);
      for (int64_t i = 0; i < 2 * rows * m.state_dim * dtype_bytes(read); ++i)
        ASSERT_EQ(data[i] == std::byte{0}, i < rows * m.state_dim * dtype_bytes(read)) << i;
    }
  }
}

TEST(SlotPool, RefusesReadCopiesThatMakeNoSense) {
  const auto check = [](DType read, DType state, Route route) {
    check_read_copy(read, state, route);
  };
  EXPECT_NO_THROW(check(DType::kFloat16, DType::kFloat32, Route::kOutputOnly));
  EXPECT_NO_THROW(check(DType::kInt8, DType::kFloat16, Route::kStateAndOutput));
  EXPECT_THROW(check(DType::kInt8, DType::kFloat32, Route::kConventional), Error);
  EXPECT_THROW(check(DType::kFloat16, DType::kFloat16, Route::kOutputOnly), Error);
  EXPECT_THROW(check(DType::kFloat32, DType::kFloat32, Route::kOutputOnly), Error);
}

TEST(SlotPool, ResetsTheCursorOnAcquire) {
  const testing::FakeModel model;
  SlotPool pool(model.config(), kRing, DType::kFloat32, DType::kFloat32, 1);
  ASSERT_EQ(pool.acquire(), 0);
  pool.set_cursor(0, {.ring_start = 99, .ring_count = 2, .ring_limit = 1, .fold_count = 2});
  pool.release(0);
  ASSERT_EQ(pool.acquire(), 0);
  EXPECT_EQ(committed_tokens(pool.cursor(0), kRing), 0);
  EXPECT_EQ(pool.cursor(0).ring_count, 0);
  EXPECT_EQ(pool.cursor(0).ring_limit, kRing.buffer_len);
  EXPECT_EQ(pool.cursor(0).fold_count, 0);
}

TEST(SlotPool, HandsOutEverySlotOnce) {
  const testing::FakeModel model;
  SlotPool pool(model.config(), kRing, DType::kFloat32, DType::kFloat32, 4);
  std::set<int32_t> slots;
  for (int i = 0; i < 4; ++i) slots.insert(pool.acquire());
  EXPECT_EQ(slots, (std::set<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(pool.acquire(), -1);
  pool.release(2);
  EXPECT_THROW(pool.release(2), Error);
  EXPECT_THROW(pool.release(4), Error);
  EXPECT_EQ(pool.acquire(), 2);
}

// Decays of their own for every column: raw gates in the activation type instead of log decays.
TEST(SlotPool, KimiDeltaKeepsRawGates) {
  ModelConfig config;
  config.kimi_delta = {.heads = 3, .head_dim = 5};
  config.layers = {{Mixer::kKimiDelta}, {Mixer::kLatentAttention}, {Mixer::kKimiDelta}};
  SlotPool pool(config, kRing, DType::kFloat32, DType::kBFloat16, 4);
  ASSERT_EQ(pool.recurrent().size(), 2);
  const int64_t rows = 3 + 2, conv = 3 + 2, inner = 3 * 5;
  EXPECT_EQ(pool.bytes(),
            4 * 2 * (inner * 5 * 4 + 3 * rows * inner * 2 + rows * 3 * 4 + conv * 3 * inner * 2));
  for (const RecurrentState& state : pool.recurrent()) {
    EXPECT_EQ(state.ring_g, nullptr);
    ASSERT_NE(state.ring_gate, nullptr);
    std::memset(state.ring_gate, 0xff, static_cast<size_t>(4 * rows * inner * 2));
  }
  const int32_t slot = pool.acquire();
  for (const RecurrentState& state : pool.recurrent()) {
    const auto* bytes = static_cast<const std::byte*>(state.ring_gate);
    for (int64_t i = 0; i < 4 * rows * inner * 2; ++i)
      ASSERT_EQ(bytes[i], i / (rows * inner * 2) == slot ? std::byte{0} : std::byte{0xff});
  }
}

// 576 values per token and layer at the published sizes, once for keys and values.
TEST(KvPool, LatentAttentionCachesTheLatentVectorAlone) {
  ModelConfig config;
  config.latent_attention = {
      .heads = 32, .latent = 512, .key_dim = 128, .shared_dim = 64, .value_dim = 128};
  config.layers = {{Mixer::kKimiDelta}, {Mixer::kLatentAttention}, {Mixer::kLatentAttention}};
  KvPool pool(config, DType::kBFloat16, 3);
  EXPECT_EQ(pool.bytes(), 3 * 2 /* layers */ * 32 * 576 * 2);
  ASSERT_EQ(pool.keys().size(), 2);
  EXPECT_EQ(pool.keys(), pool.values());
  EXPECT_NE(pool.keys()[0], pool.keys()[1]);
}

TEST(KvPool, GrowsTablesByWholeBlocksOrNotAtAll) {
  const testing::FakeModel model;
  KvPool pool(model.config(), DType::kBFloat16, 4);
  const AttentionConfig& attention = model.config().attention;
  EXPECT_EQ(pool.bytes(),
            4 * 2 /* layers */ * 2 /* k, v */ * attention.kv_heads * 32 * attention.head_dim * 2);
  EXPECT_EQ(pool.keys().size(), 2);
  EXPECT_EQ(pool.values().size(), 2);
  std::vector<int32_t> a, b;
  EXPECT_TRUE(pool.grow(a, 1));
  EXPECT_EQ(a.size(), 1);
  EXPECT_TRUE(pool.grow(a, 32));
  EXPECT_EQ(a.size(), 1);
  EXPECT_TRUE(pool.grow(a, 33));
  EXPECT_TRUE(pool.grow(b, 32));
  EXPECT_EQ(a.size(), 2);
  EXPECT_FALSE(pool.grow(b, 97));
  EXPECT_EQ(b.size(), 1);
  EXPECT_EQ(pool.free_blocks(), 1);
  EXPECT_EQ((std::set<int32_t>{a[0], a[1], b[0]}).size(), 3);
  pool.release(a);
  EXPECT_TRUE(a.empty());
  EXPECT_TRUE(pool.grow(b, 97));
  EXPECT_EQ(pool.free_blocks(), 0);
  EXPECT_TRUE(pool.grow(b, 5));  // never shrinks
  EXPECT_EQ(b.size(), 4);
}

}  // namespace
}  // namespace replayssm
