#include "ops/cpu/slots.h"

#include <gtest/gtest.h>

#include <numeric>

#include "ops/recurrent_harness.h"

namespace replayssm::testing {
namespace {

constexpr int64_t kSlots = 5, kChannels = 37;
constexpr RingConfig kRing{.buffer_len = 4, .max_window = 6, .conv_kernel = 4};

// A layer whose every byte differs from its neighbours'.
class Layer {
 public:
  explicit Layer(const Case& c) : case_(c), pool(c, kRing, kSlots) {
    conv.allocate(kSlots, conv_rows(kRing.conv_kernel, kRing.max_window) * kChannels *
                              dtype_bytes(c.activation));
    std::mt19937 random(7);
    for (PoolArray* array : all()) {
      for (uint8_t& byte : array->bytes) byte = static_cast<uint8_t>(random());
    }
  }

  std::vector<PoolArray*> all() {
    std::vector<PoolArray*> list{&conv};
    for (PoolArray* array : pool.arrays()) list.push_back(array);
    return list;
  }
  template <class Params>
  Params params(const std::vector<int32_t>& slots, bool with_conv = true) {
    Params p;
    p.shape = case_.shape;
    p.batch.sequences = std::ssize(slots);
    p.batch.slot = slots.data();
    p.batch.ring = kRing;
    p.state = pool.state();
    if (with_conv) p.conv_inputs = conv.data();
    p.channels = kChannels;
    return p;
  }
  std::vector<std::vector<uint8_t>> bytes() {
    std::vector<std::vector<uint8_t>> list;
    for (PoolArray* array : all()) list.push_back(array->bytes);
    return list;
  }

 private:
  Case case_;

 public:
  Pool pool;
  PoolArray conv;
};

class Slots : public ::testing::TestWithParam<Case> {
 protected:
  ThreadPool threads_{2};
};

INSTANTIATE_TEST_SUITE_P(Layers, Slots, ::testing::ValuesIn(cases_with_copies()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

TEST_P(Slots, CopyTakesAllThatALayerKeeps) {
  for (const bool with_conv : {true, false}) {
    Layer layer(GetParam());
    auto want = layer.bytes();
    const auto arrays = layer.all();
    for (size_t i = with_conv ? 0 : 1; i < arrays.size(); ++i) {
      const int64_t size = arrays[i]->slot_bytes;
      for (const auto& [from, to] : {std::pair{3, 0}, {1, 4}})
        std::copy_n(arrays[i]->bytes.begin() + from * size, size, want[i].begin() + to * size);
    }
    const std::vector<int32_t> slots = {3, -1, 1, 2}, targets = {0, 2, 4, -1};
    auto p = layer.params<SlotCopyParams>(slots, with_conv);
    p.target_slot = targets.data();
    cpu::slot_copy(p, threads_);
    EXPECT_EQ(layer.bytes(), want) << name(GetParam());
  }
}

TEST_P(Slots, ClearZeroesWhatASequenceStartsFrom) {
  Layer layer(GetParam());
  auto want = layer.bytes();
  const auto arrays = layer.all();
  Pool& pool = layer.pool;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const bool kept = arrays[i] == &layer.conv || arrays[i] == &pool.checkpoint ||
                      arrays[i] == &pool.read_copy || arrays[i] == &pool.read_scale;
    if (!kept) continue;
    for (const int64_t slot : {4, 0})
      std::fill_n(want[i].begin() + slot * arrays[i]->slot_bytes, arrays[i]->slot_bytes, 0);
  }
  const std::vector<int32_t> slots = {4, -1, 0};
  cpu::slot_clear(layer.params<SlotClearParams>(slots), threads_);
  EXPECT_EQ(layer.bytes(), want) << name(GetParam());
}

TEST_P(Slots, CompactMovesAPathTogether) {
  std::mt19937 random(4);
  for (int trial = 0; trial < 10; ++trial) {
    Layer layer(GetParam());
    Pool& pool = layer.pool;
    const std::vector<int32_t> slots = {2, -1, 0, 3};
    std::vector<int32_t> query_start{0}, path, accepted;
    for (const int32_t slot : slots) {
      const auto window = static_cast<int32_t>(random() % (kRing.max_window + 1));
      std::vector<int64_t> rows(window);
      std::iota(rows.begin(), rows.end(), 0);
      std::ranges::shuffle(rows, random);
      rows.resize(random() % (window + 1));
      std::ranges::sort(rows);
      if (slot >= 0) {
        pool.cursors[slot].ring_start = 3 + static_cast<int64_t>(random() % 100);
        const int64_t room = std::max<int64_t>(kRing.buffer_len - window, 0);
        pool.cursors[slot].ring_count = static_cast<int32_t>(random() % (room + 1));
      }
      accepted.push_back(static_cast<int32_t>(rows.size()));
      for (const int64_t row : rows) path.push_back(static_cast<int32_t>(row));
      path.resize(query_start.back() + window, -9);
      query_start.push_back(query_start.back() + window);
    }
    Layer expected = layer;
    for (size_t s = 0; s < slots.size(); ++s) {
      if (slots[s] < 0) continue;
      const std::vector<int64_t> rows(path.begin() + query_start[s],
                                      path.begin() + query_start[s] + accepted[s]);
      expected.pool.move_rows(slots[s], rows);
      const int64_t first = pool.cursors[slots[s]].ring_start + pool.cursors[slots[s]].ring_count;
      const int64_t conv = conv_rows(kRing.conv_kernel, kRing.max_window);
      const auto bytes = expected.conv.slot(slots[s]);
      const int64_t width = static_cast<int64_t>(bytes.size()) / conv;
      for (size_t i = 0; i < rows.size(); ++i)
        std::memmove(bytes.data() + (first + static_cast<int64_t>(i)) % conv * width,
                     bytes.data() + (first + rows[i]) % conv * width, width);
    }
    auto p = layer.params<CompactParams>(slots);
    p.batch.query_start = query_start.data();
    p.batch.cursors = pool.cursors.data();
    p.path = path.data();
    p.accepted = accepted.data();
    cpu::compact(p, threads_);
    EXPECT_EQ(layer.bytes(), expected.bytes()) << name(GetParam());
  }
}

}  // namespace
}  // namespace replayssm::testing
