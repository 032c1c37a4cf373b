// The convolution on the device: windows, trees and prompts.
#include "ops/cuda/conv.h"

#include <cmath>
#include <cstring>
#include <random>

#include "core/dispatch.h"
#include "ops/cuda/launches.h"
#include "ops/reference/conv.h"
#include "ops/reference/sequence.h"
#include "replay/cursor.h"
#include "replayssm/error.h"

namespace replayssm::testing {
namespace {

struct ConvCase {
  int64_t channels;
  int32_t kernel;
  DType dtype, x_dtype;
  bool bias;
};

// Tokens of a sequence: x is [tokens, channels]; no parents: a chain.
struct ConvWindow {
  int32_t slot = 0;
  std::vector<float> x;
  std::vector<int32_t> parent;
};

constexpr int64_t kSlots = 4, kGap = 8;

class CudaConv : public ::testing::TestWithParam<ConvCase> {
 protected:
  CudaConv() : random_(GetParam().channels) {
    for (auto [x, count] : {std::pair{&weight_, c_.kernel * c_.channels}, {&bias_, c_.channels}})
      *x = values(count);
  }

  // A pool in which no slot has inputs but zeros before its first token.
  void reset(int32_t max_window) {
    ring_ = {.buffer_len = 4, .max_window = max_window, .conv_kernel = c_.kernel};
    cursors_.assign(kSlots, reset_cursor(ring_));
    inputs_.assign(kSlots * slot_bytes(), 0);
    committed_.assign(kSlots, {});
    for (int32_t slot = 0; slot < kSlots; ++slot) poison(slot);
  }
  int64_t rows() const { return conv_rows(c_.kernel, ring_.max_window); }
  int64_t row_bytes() const { return c_.channels * dtype_bytes(c_.dtype); }
  int64_t slot_bytes() const { return rows() * row_bytes(); }
  uint8_t* row(int32_t slot, int64_t counter) {
    return inputs_.data() + slot * slot_bytes() + counter % rows() * row_bytes();
  }
  int64_t counter(int32_t slot) const {
    return cursors_[slot].ring_start + cursors_[slot].ring_count;
  }
  // Rows that a slot's next window does not read become NaN.
  void poison(int32_t slot) {
    for (int64_t i = 0; i < ring_.max_window; ++i)
      std::fill_n(row(slot, counter(slot) + i), row_bytes(), 0xff);
  }

  float as_input(float x) const {
    if (c_.x_dtype == DType::kFloat32) return x;
    dispatch_float(c_.x_dtype, [&]<class T>() { x = rounded<T>(x); });
    return x;
  }
  std::vector<float> values(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> x(count);
    for (float& value : x) value = as_input(normal(random_));
    return x;
  }
  ConvWindow window(int32_t slot, int64_t tokens, bool tree) {
    ConvWindow w{slot, values(tokens * c_.channels), {}};
    for (int32_t i = 0; i < tokens && tree; ++i)
      w.parent.push_back(static_cast<int32_t>(random_() % (i + 1)) - 1);
    return w;
  }

  // Device memory of a call.
  struct Device {
    DeviceArray<uint8_t> x, inputs, y;
    DeviceArray<float> weight, bias;
    DeviceArray<int32_t> query_start, slot, parent;
    DeviceArray<Cursor> cursors;
    ConvParams p;
  };
  void upload(const std::vector<ConvWindow>& windows, Device& d) const {
    std::vector<int32_t> start{0}, slot, parent;
    bool trees = false;
    for (const ConvWindow& w : windows) {
      const auto tokens = static_cast<int32_t>(std::ssize(w.x) / c_.channels);
      for (int32_t i = 0; i < tokens; ++i) parent.push_back(w.parent.empty() ? i - 1 : w.parent[i]);
      trees |= !w.parent.empty();
      start.push_back(start.back() + tokens);
      slot.push_back(w.slot);
    }
    dispatch_float(c_.x_dtype, [&]<class T>() {
      std::vector<uint8_t> bytes((start.back() + 1) * (c_.channels + kGap) * sizeof(T), 0xff);
      T* to = reinterpret_cast<T*>(bytes.data());
      for (const ConvWindow& w : windows)
        for (int64_t i = 0; i < std::ssize(w.x); ++i) {
          if (w.slot >= 0) to[i % c_.channels] = from_float<T>(w.x[i]);
          if ((i + 1) % c_.channels == 0) to += c_.channels + kGap;
        }
      d.x = bytes;
    });
    d.inputs = inputs_;
    d.y = std::vector<uint8_t>((start.back() + 1) * row_bytes(), 0xff);
    d.weight = weight_;
    d.bias = bias_;
    d.query_start = start;
    d.slot = slot;
    d.parent = parent;
    d.cursors = cursors_;
    d.p.batch = {std::ssize(windows),
                 d.query_start.data(),
                 d.slot.data(),
                 d.cursors.data(),
                 ring_,
                 trees ? d.parent.data() : nullptr};
    d.p.channels = c_.channels;
    d.p.activation_dtype = c_.dtype;
    d.p.x_dtype = c_.x_dtype;
    d.p.x = d.x.data();
    d.p.x_stride = c_.channels + kGap;
    d.p.weight = d.weight.data();
    d.p.bias = c_.bias ? d.bias.data() : nullptr;
    d.p.inputs = d.inputs.data();
    d.p.y = d.y.data();
  }
  // The outputs of all windows, one behind another; nothing behind them was written.
  std::vector<float> outputs(const Device& d) const {
    std::vector<uint8_t> bytes;
    d.y.download(bytes);
    EXPECT_TRUE(std::all_of(bytes.end() - row_bytes(), bytes.end(),
                            [](uint8_t byte) { return byte == 0xff; }));
    std::vector<float> y((bytes.size() - row_bytes()) / dtype_bytes(c_.dtype));
    dispatch_float(c_.dtype, [&]<class T>() {
      for (size_t i = 0; i < y.size(); ++i)
        y[i] = to_float(reinterpret_cast<const T*>(bytes.data())[i]);
    });
    return y;
  }

  // Runs a call; what it stores is here afterwards.
  std::vector<float> run(const std::vector<ConvWindow>& windows, int64_t longest = 0) {
    for (const ConvWindow& w : windows)
      if (w.slot >= 0) begin_step(cursors_[w.slot], std::ssize(w.x) / c_.channels, ring_);
    const auto [y, kept] = same_in_every_run([&](bool graph) {
      Device device;
      upload(windows, device);
      run_call([&](cudaStream_t stream) { cuda::causal_conv(device.p, longest, stream); }, graph);
      std::vector<uint8_t> kept;
      device.inputs.download(kept);
      return std::pair(outputs(device), kept);
    });
    inputs_ = kept;
    return y;
  }

  // Compares with the definition.
  void expect_outputs(const std::vector<ConvWindow>& windows, const std::vector<float>& y) {
    const double half_ulp = c_.dtype == DType::kFloat32   ? 0x1p-24
                            : c_.dtype == DType::kFloat16 ? 0x1p-11
                                                          : 0x1p-8;
    size_t first = 0;
    for (const ConvWindow& w : windows) {
      const int64_t tokens = std::ssize(w.x) / c_.channels;
      const auto parent = w.parent.empty() ? reference::chain(tokens) : w.parent;
      for (int64_t ch = 0; ch < c_.channels; ++ch) {
        const auto weight = column(weight_, ch);
        const auto before = w.slot < 0 ? std::vector<double>() : column(committed_[w.slot], ch);
        const auto in = column(w.x, ch, true);
        for (int64_t i = 0; i < tokens; ++i) {
          const double bias = c_.bias ? bias_[ch] : 0;
          const double want =
              w.slot < 0 ? 0 : reference::causal_conv(weight, bias, before, in, parent, i);
          // Rounding of the result, and of a sum of kernel + 1 products of size ~ 3.
          ASSERT_NEAR(y[first + i * c_.channels + ch], want,
                      half_ulp * std::abs(want) + (c_.kernel + 4) * 8 * 0x1p-24)
              << "slot " << w.slot << " token " << i << " channel " << ch;
        }
      }
      first += w.x.size();
    }
  }
  std::vector<double> column(const std::vector<float>& rows, int64_t ch, bool round = false) const {
    std::vector<double> values;
    for (size_t i = ch; i < rows.size(); i += c_.channels) {
      float x = rows[i];
      if (round) dispatch_float(c_.dtype, [&]<class T>() { x = rounded<T>(x); });
      values.push_back(x);
    }
    return values;
  }

  // Rows `path` of a window join the sequence, moved together as compact does.
  void commit(const ConvWindow& w, const std::vector<int32_t>& path) {
    for (size_t i = 0; i < path.size(); ++i) {
      std::memmove(row(w.slot, counter(w.slot) + static_cast<int64_t>(i)),
                   row(w.slot, counter(w.slot) + path[i]), row_bytes());
      append(w, path[i]);
    }
    commit_step(cursors_[w.slot], std::ssize(path), Route::kOutputOnly);
    poison(w.slot);
  }
  void append(const ConvWindow& w, int64_t i) {
    for (int64_t ch = 0; ch < c_.channels; ++ch) {
      float x = w.x[i * c_.channels + ch];
      dispatch_float(c_.dtype, [&]<class T>() { x = rounded<T>(x); });
      committed_[w.slot].push_back(x);
    }
  }

  const ConvCase c_ = GetParam();
  std::mt19937 random_;
  RingConfig ring_;
  std::vector<float> weight_, bias_;
  std::vector<uint8_t> inputs_;
  std::vector<Cursor> cursors_;
  std::vector<std::vector<float>> committed_;  // [slots] of [tokens, channels], rounded
};

constexpr DType kSingle = DType::kFloat32, kBf = DType::kBFloat16, kHalf = DType::kFloat16;
INSTANTIATE_TEST_SUITE_P(
    Shapes, CudaConv,
    ::testing::Values(ConvCase{64, 4, kSingle, kSingle, true},
                      ConvCase{131, 4, kBf, kSingle, false}, ConvCase{136, 4, kBf, kBf, true},
                      ConvCase{2080, 4, kBf, kSingle, true}, ConvCase{8, 3, kHalf, kSingle, true},
                      ConvCase{7, 3, kHalf, kHalf, true}, ConvCase{1, 1, kSingle, kSingle, false},
                      ConvCase{24, 1, kHalf, kHalf, false}, ConvCase{20, 8, kSingle, kSingle, true},
                      ConvCase{16, 6, kBf, kBf, false}, ConvCase{300, 2, kSingle, kSingle, true},
                      ConvCase{128, 4, kBf, kSingle, true}, ConvCase{256, 4, kHalf, kHalf, false}));

// Ragged windows, chains and trees in turn, any of which may be rejected; padding; idle slots.
TEST_P(CudaConv, StepsMatchTheDefinition) {
  REQUIRE_DEVICE();
  for (const int32_t max_window : {1, 7, 20}) {
    SCOPED_TRACE(max_window);
    reset(max_window);
    for (int step = 0; step < 10; ++step) {
      const bool tree = step % 2 == 1;
      std::vector<ConvWindow> windows;
      for (const int32_t slot : {2, -1, 0, 3})
        windows.push_back(window(slot, random_() % (max_window + 1), tree));
      const auto y = run(windows);
      expect_outputs(windows, y);
      for (const ConvWindow& w : windows) {
        if (w.slot < 0) continue;
        const auto tokens = static_cast<int32_t>(std::ssize(w.x) / c_.channels);
        std::vector<int32_t> path;
        int32_t i = static_cast<int32_t>(random_() % (tokens + 1)) - 1;
        for (; i >= 0; i = tree ? w.parent[i] : i - 1) path.insert(path.begin(), i);
        commit(w, path);
      }
    }
    EXPECT_TRUE(std::all_of(inputs_.begin() + slot_bytes() + (c_.kernel - 1) * row_bytes(),
                            inputs_.begin() + 2 * slot_bytes(),
                            [](uint8_t byte) { return byte == 0xff; }));
  }
}

// Prompts of any length, shorter ones than the kernel included, cut into pieces or not.
TEST_P(CudaConv, PromptsMatchTheDefinition) {
  REQUIRE_DEVICE();
  for (const int64_t length : {1, 2, 3, 5, 11, 16, 33, 100}) {
    SCOPED_TRACE(length);
    reset(1);
    for (int piece = 0; piece < 2; ++piece) {
      const std::vector<ConvWindow> windows{window(1, length, false), window(-1, 3, false)};
      const auto before = inputs_;
      const auto whole = run(windows);
      const auto kept = inputs_;
      inputs_ = before;
      EXPECT_EQ(run(windows, length), whole);
      EXPECT_EQ(inputs_, kept);
      expect_outputs(windows, whole);
      for (int64_t i = 0; i < length; ++i) append(windows[0], i);
      commit_prefill(cursors_[1], length, ring_);
      poison(1);
    }
  }
}

// Whatever a call was told of its windows: captured ones are replayed with others.
TEST_P(CudaConv, LongerWindowsThanToldAreServed) {
  REQUIRE_DEVICE();
  constexpr int32_t kMaxWindow = 7;
  for (const bool tree : {false, true}) {
    SCOPED_TRACE(tree);
    reset(kMaxWindow);
    const std::vector<ConvWindow> windows{window(2, kMaxWindow, tree), window(-1, 3, tree),
                                          window(0, 1, tree), window(3, tree ? 2 : 40, tree)};
    const auto before = inputs_;
    const auto cursors = cursors_;
    const auto whole = run(windows);
    const auto kept = inputs_;
    expect_outputs(windows, whole);
    inputs_ = before;
    cursors_ = cursors;
    EXPECT_EQ(run(windows, 1), whole);
    EXPECT_EQ(inputs_, kept);
  }
}

// A text taken at once or token by token has the same bits, however unrounded its inputs are:
// within a window they are rounded like the kept ones (pitfalls 27).
TEST_P(CudaConv, WindowsAreTheirTokensBitForBit) {
  REQUIRE_DEVICE();
  reset(8);
  const ConvWindow all = window(2, 8, false);
  const auto whole = run({all});
  const auto kept = inputs_;
  reset(8);
  std::vector<float> single;
  for (int64_t t = 0; t < 8; ++t) {
    const auto* x = all.x.data() + t * c_.channels;
    const auto y = run({{2, {x, x + c_.channels}, {}}}, 1);
    single.insert(single.end(), y.begin(), y.end());
    commit_step(cursors_[2], 1, Route::kOutputOnly);
  }
  EXPECT_EQ(single, whole);
  EXPECT_EQ(inputs_, kept);
  // Nor do parents change a chain.
  reset(8);
  ConvWindow chain = all;
  chain.parent = reference::chain(8);
  EXPECT_EQ(run({chain}), whole);
  EXPECT_EQ(inputs_, kept);
}

// A captured call serves whatever windows come: shorter, longer, none.
TEST_P(CudaConv, AGraphServesAnyWindows) {
  REQUIRE_DEVICE();
  reset(6);
  const auto window_of = [&](int64_t tokens) { return window(1, tokens, false); };
  Device device;
  // Memory for twelve tokens in two windows.
  upload({window_of(6), window(3, 6, false)}, device);
  const Graph graph([&](cudaStream_t stream) { cuda::causal_conv(device.p, 0, stream); });
  for (const auto& [one, two] : {std::pair{1, 1}, {6, 0}, {0, 5}, {3, 6}}) {
    SCOPED_TRACE(one);
    reset(6);
    const std::vector<ConvWindow> windows{window(1, one, false), window(3, two, false)};
    std::vector<ConvWindow> padded = windows;
    padded.push_back(window(0, 12 - one - two, false));  // keeps all arrays where they are
    Device fresh;
    upload(padded, fresh);
    std::vector<uint8_t> bytes;
    fresh.x.download(bytes);
    device.x = bytes;
    device.inputs = inputs_;
    device.cursors = cursors_;
    device.query_start = std::vector<int32_t>{0, one, one + two};
    graph.replay();
    auto y = outputs(device);
    y.resize((one + two) * c_.channels);
    expect_outputs(windows, y);
  }
}

TEST(CudaConvContracts, WrongArgumentsAreNamed) {
  alignas(16) float data[16];
  int32_t slot = 0;
  ConvParams right;
  right.batch = {1, &slot, &slot, reinterpret_cast<const Cursor*>(data), {}};
  right.channels = right.x_stride = 8;
  right.activation_dtype = DType::kBFloat16;
  right.x = right.weight = data;
  right.inputs = right.y = data;
  const auto message = [&](auto&& change) {
    ConvParams p = right;
    change(p);
    try {
      cuda::causal_conv(p, 0, nullptr);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using P = ConvParams;
  EXPECT_EQ(message([](P& p) { p.x_dtype = DType::kFloat16; }),
            "x_dtype: expected float32 or activation_dtype = bfloat16, got float16");
  EXPECT_EQ(message([](P& p) { p.x_stride = 7; }), "x_stride: expected at least 8, got 7");
  EXPECT_EQ(message([](P& p) { p.channels = p.x_stride = (1 << 20) + 1; }),
            "channels: expected at most 1048576, got 1048577");
  EXPECT_EQ(message([](P& p) { p.batch.ring.conv_kernel = 9; }),
            "batch.ring.conv_kernel: expected at most 8, got 9");
  EXPECT_EQ(message([](P& p) { p.y = nullptr; }), "y: expected memory, got a null pointer");
  EXPECT_EQ(message([](P& p) { p.batch.sequences = 0, p.y = nullptr; }), "");
}

}  // namespace
}  // namespace replayssm::testing
