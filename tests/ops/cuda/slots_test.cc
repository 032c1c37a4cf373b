// Slots on the device: what is cleared, copied and compacted, to the byte, and nothing else.
#include "ops/cuda/slots.h"

#include <numeric>

#include "ops/cuda/harness.h"
#include "ops/cuda/launches.h"
#include "replayssm/error.h"

namespace replayssm::testing {
namespace {

constexpr int64_t kSlots = 5;
constexpr RingConfig kRing{.buffer_len = 4, .max_window = 6, .conv_kernel = 4};

using Bytes = std::vector<std::vector<uint8_t>>;

// A layer whose every byte differs from its neighbours'.
class Layer {
 public:
  Layer(const Case& c, int64_t channels) : case_(c), channels_(channels), pool(c, kRing, kSlots) {
    conv.allocate(kSlots, conv_rows(kRing.conv_kernel, kRing.max_window) * channels *
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
  Bytes bytes() {
    Bytes list;
    for (PoolArray* array : all()) list.push_back(array->bytes);
    return list;
  }
  // What `call(params, stream)` leaves of this layer on the device; `fill` adds to the parameters.
  template <class Params, class Op, class Fill>
  Bytes after(Op op, const std::vector<int32_t>& slots, bool with_conv, Fill&& fill) {
    return same_in_every_run([&](bool graph) {
      Layer copy = *this;
      DevicePool device(copy.pool);
      DeviceArray<uint8_t> device_conv(conv.bytes);
      const DeviceArray<int32_t> device_slots(slots);
      Params p;
      p.shape = case_.shape;
      p.batch.sequences = std::ssize(slots);
      p.batch.slot = device_slots.data();
      p.batch.cursors = device.cursors();
      p.batch.ring = kRing;
      p.state = device.state();
      if (with_conv) p.conv_inputs = device_conv.data();
      p.channels = channels_;
      fill(p);
      run_call([&](cudaStream_t stream) { op(p, stream); }, graph);
      device.download();
      device_conv.download(copy.conv.bytes);
      return copy.bytes();
    });
  }

 private:
  Case case_;
  int64_t channels_;

 public:
  Pool pool;
  PoolArray conv;
};

class CudaSlots : public ::testing::TestWithParam<Case> {
 protected:
  // Rows of inputs that 16 bytes divide, and that no word but one element does.
  Layer layer() const { return Layer(GetParam(), GetParam().shape.heads % 4 ? 37 : 4096); }
};

INSTANTIATE_TEST_SUITE_P(Layers, CudaSlots, ::testing::ValuesIn(cases_with_copies()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

TEST_P(CudaSlots, CopyTakesAllThatALayerKeeps) {
  REQUIRE_DEVICE();
  for (const bool with_conv : {true, false}) {
    Layer before = layer();
    auto want = before.bytes();
    const auto arrays = before.all();
    for (size_t i = with_conv ? 0 : 1; i < arrays.size(); ++i) {
      const int64_t size = arrays[i]->slot_bytes;
      for (const auto& [from, to] : {std::pair{3, 0}, {1, 4}})
        std::copy_n(arrays[i]->bytes.begin() + from * size, size, want[i].begin() + to * size);
    }
    const DeviceArray<int32_t> targets(std::vector<int32_t>{0, 2, 4, -1});
    EXPECT_EQ(
        before.after<SlotCopyParams>(cuda::slot_copy, {3, -1, 1, 2}, with_conv,
                                     [&](SlotCopyParams& p) { p.target_slot = targets.data(); }),
        want)
        << name(GetParam());
  }
}

TEST_P(CudaSlots, ClearZeroesWhatASequenceStartsFrom) {
  REQUIRE_DEVICE();
  Layer before = layer();
  auto want = before.bytes();
  const auto arrays = before.all();
  Pool& pool = before.pool;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const bool kept = arrays[i] == &before.conv || arrays[i] == &pool.checkpoint ||
                      arrays[i] == &pool.read_copy || arrays[i] == &pool.read_scale;
    if (!kept) continue;
    for (const int64_t slot : {4, 0})
      std::fill_n(want[i].begin() + slot * arrays[i]->slot_bytes, arrays[i]->slot_bytes, 0);
  }
  EXPECT_EQ(before.after<SlotClearParams>(cuda::slot_clear, {4, -1, 0}, true, [](auto&) {}), want)
      << name(GetParam());
}

TEST_P(CudaSlots, CompactMovesAPathTogether) {
  REQUIRE_DEVICE();
  std::mt19937 random(4);
  for (int trial = 0; trial < 6; ++trial) {
    Layer before = layer();
    Pool& pool = before.pool;
    const std::vector<int32_t> slots = {2, -1, 0, 3};
    std::vector<int32_t> query_start{0}, path, accepted;
    for (const int32_t slot : slots) {
      const auto window = static_cast<int32_t>(random() % (kRing.max_window + 1));
      std::vector<int32_t> rows(window);
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
      path.insert(path.end(), rows.begin(), rows.end());
      path.resize(query_start.back() + window, -9);
      query_start.push_back(query_start.back() + window);
    }
    Layer expected = before;
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
    const DeviceArray<int32_t> start(query_start), paths(path), counts(accepted);
    EXPECT_EQ(before.after<CompactParams>(cuda::compact, slots, true,
                                          [&](CompactParams& p) {
                                            p.batch.query_start = start.data();
                                            p.path = paths.data();
                                            p.accepted = counts.data();
                                          }),
              expected.bytes())
        << name(GetParam());
  }
}

TEST(CudaSlotsContracts, WrongArgumentsAreNamed) {
  alignas(16) float data[16];
  int32_t slot = 0;
  CompactParams p;
  p.shape = {.heads = 1, .key_heads = 1, .head_dim = 1, .state_dim = 1};
  p.batch = {1, &slot, &slot, reinterpret_cast<const Cursor*>(data), kRing};
  p.state.checkpoint = data;
  const auto message = [](auto&& call) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message([&] { cuda::compact(p, nullptr); }),
            "path: expected memory, got a null pointer");
  p.path = &slot;
  EXPECT_EQ(message([&] { cuda::compact(p, nullptr); }),
            "accepted: expected memory, got a null pointer");
  p.accepted = &slot;
  p.batch.sequences = 65536;
  EXPECT_EQ(message([&] { cuda::compact(p, nullptr); }),
            "batch.sequences: expected at most 65535, got 65536");
}

}  // namespace
}  // namespace replayssm::testing
