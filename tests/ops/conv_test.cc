#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/buffer.h"
#include "core/dispatch.h"
#include "ops/cpu/recurrent.h"
#include "replay/cursor.h"

namespace replayssm {
namespace {

struct ConvCase {
  int64_t channels;
  int32_t kernel;
  DType dtype;
  bool bias;
};

class Conv : public ::testing::TestWithParam<ConvCase> {
 protected:
  void SetUp() override {
    const auto c = GetParam();
    std::mt19937 random(c.channels);
    std::normal_distribution<float> normal;
    for (auto [x, count] : {std::pair{&weight_, c.kernel * c.channels},
                            {&bias_, c.channels},
                            {&x_, kTokens * c.channels}}) {
      x->resize(count);
      for (float& value : *x) value = normal(random);
    }
    reset(3);
  }

  // Slot 1 starts from nothing, the others are filled with a pattern.
  void reset(int32_t max_window) {
    const auto c = GetParam();
    ring_ = {.buffer_len = 4, .max_window = max_window, .conv_kernel = c.kernel};
    const int64_t rows = conv_rows(c.kernel, ring_.max_window) * c.channels;
    inputs_.assign(3 * rows * dtype_bytes(c.dtype), 0xff);
    std::fill_n(inputs_.begin() + rows * dtype_bytes(c.dtype), rows * dtype_bytes(c.dtype), 0);
    cursors_.assign(3, reset_cursor(ring_));
  }

  // Output of all tokens in double, from inputs rounded to the activation dtype.
  std::vector<double> expected() const {
    const auto c = GetParam();
    std::vector<double> y(x_.size());
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t ch = 0; ch < c.channels; ++ch) {
        double sum = c.bias ? bias_[ch] : 0.0;
        for (int64_t j = 0; j < c.kernel; ++j) {
          const int64_t source = t - (c.kernel - 1) + j;
          if (source < 0) continue;
          float x = x_[source * c.channels + ch];
          dispatch_float(c.dtype, [&]<class T>() { x = rounded<T>(x); });
          sum += double{weight_[j * c.channels + ch]} * x;
        }
        y[t * c.channels + ch] = sum / (1 + std::exp(-sum));
      }
    }
    return y;
  }

  // Runs tokens [begin, end) in slot 1 behind a padded row of NaN; returns their outputs.
  std::vector<float> run(int64_t begin, int64_t end, const std::vector<float>& x) {
    const auto c = GetParam();
    const int32_t query_start[] = {0, 1, static_cast<int32_t>(end - begin) + 1};
    const int32_t slot[] = {-1, 1};
    std::vector<uint8_t> y((end - begin + 1) * c.channels * dtype_bytes(c.dtype), 0xff);
    std::vector<float> packed(c.channels, std::numeric_limits<float>::quiet_NaN());
    packed.insert(packed.end(), x.begin() + begin * c.channels, x.begin() + end * c.channels);
    ConvParams p;
    p.batch = {2, query_start, slot, cursors_.data(), ring_};
    p.channels = c.channels;
    p.activation_dtype = c.dtype;
    p.x = packed.data();
    p.x_stride = c.channels;
    p.weight = weight_.data();
    p.bias = c.bias ? bias_.data() : nullptr;
    p.inputs = inputs_.data();
    p.y = y.data();
    op_(p, pool_);
    std::vector<float> out((end - begin + 1) * c.channels);
    dispatch_float(c.dtype, [&]<class T>() {
      for (size_t i = 0; i < out.size(); ++i) out[i] = to_float(reinterpret_cast<T*>(y.data())[i]);
    });
    for (int64_t ch = 0; ch < c.channels; ++ch) EXPECT_EQ(out[ch], 0.0f);
    return {out.begin() + c.channels, out.end()};
  }

  void expect_close(const std::vector<float>& got, const std::vector<double>& want, int64_t begin) {
    const auto c = GetParam();
    const double half_ulp = c.dtype == DType::kFloat32   ? 0x1p-24
                            : c.dtype == DType::kFloat16 ? 0x1p-11
                                                         : 0x1p-8;
    for (size_t i = 0; i < got.size(); ++i) {
      const double value = want[begin * c.channels + i];
      // Rounding of the result, and of a sum of kernel + 1 products of size ~ 3.
      ASSERT_NEAR(got[i], value, half_ulp * std::abs(value) + (c.kernel + 4) * 8 * 0x1p-24) << i;
    }
  }

  static constexpr int64_t kTokens = 40;
  ThreadPool pool_{2};
  void (*op_)(const ConvParams&, ThreadPool&) = cpu::causal_conv;
  RingConfig ring_;
  std::vector<float> weight_, bias_, x_;
  std::vector<uint8_t> inputs_;
  std::vector<Cursor> cursors_;
};

INSTANTIATE_TEST_SUITE_P(Shapes, Conv,
                         ::testing::Values(ConvCase{64, 4, DType::kFloat32, true},
                                           ConvCase{131, 4, DType::kBFloat16, false},
                                           ConvCase{7, 3, DType::kFloat16, true},
                                           ConvCase{1, 1, DType::kFloat32, false},
                                           ConvCase{300, 2, DType::kFloat32, true}));

TEST_P(Conv, PromptThenWindowsMatchTheDefinition) {
  const auto want = expected();
  expect_close(run(0, 11, x_), want, 0);
  commit_prefill(cursors_[1], 11, ring_);
  expect_close(run(11, 13, x_), want, 11);
  commit_prefill(cursors_[1], 2, ring_);
  for (int64_t t = 13; t < kTokens; ++t) {
    expect_close(run(t, t + 1, x_), want, t);
    commit_step(cursors_[1], 1, Route::kOutputOnly);
    if (t % 5 == 0) commit_fold(cursors_[1]);
  }
}

// A piece longer than a decode window, yet shorter than the kernel, leaves older inputs in place.
TEST_P(Conv, ShortPiecesOfAPromptMatchTheDefinition) {
  const auto want = expected();
  for (const int64_t piece : {1, 2, 3, 5}) {
    SCOPED_TRACE(piece);
    reset(1);
    for (int64_t t = 0; t + piece <= kTokens; t += piece) {
      expect_close(run(t, t + piece, x_), want, t);
      commit_prefill(cursors_[1], piece, ring_);
    }
  }
}

TEST_P(Conv, RejectedTokensLeaveNoTrace) {
  const auto want = expected();
  const auto c = GetParam();
  auto other = x_;
  for (float& value : other) value = -value + 1;
  std::mt19937 random(9);
  for (int64_t t = 0; t + 3 <= kTokens;) {
    const int64_t accepted = random() % 4;
    auto mixed = x_;
    std::copy(other.begin() + (t + accepted) * c.channels, other.end(),
              mixed.begin() + (t + accepted) * c.channels);
    begin_step(cursors_[1], 3, ring_);
    auto got = run(t, t + 3, mixed);
    got.resize(accepted * c.channels);
    expect_close(got, want, t);
    commit_step(cursors_[1], accepted, Route::kOutputOnly);
    t += accepted;
  }
}

// A text taken at once or token by token has the same bits, however unrounded its inputs are:
// within a window they are rounded like the kept ones (pitfalls 27).
TEST_P(Conv, WindowsAreTheirTokensBitForBit) {
  reset(8);
  const auto whole = run(0, 8, x_);
  reset(8);
  std::vector<float> single;
  for (int64_t t = 0; t < 8; ++t) {
    const auto y = run(t, t + 1, x_);
    single.insert(single.end(), y.begin(), y.end());
    commit_step(cursors_[1], 1, Route::kOutputOnly);
  }
  EXPECT_EQ(single, whole);
}

// Inputs that come in the activation type are those that fp32 ones are rounded to.
TEST_P(Conv, InputsOfTheActivationTypeGiveTheSameBits) {
  const auto c = GetParam();
  dispatch_float(c.dtype, [&]<class T>() {
    std::vector<T> x;
    for (const float value : x_) x.push_back(from_float<T>(value));
    const int32_t query_start[] = {0, kTokens}, slot = 1;
    std::vector<uint8_t> y[2], inputs[2];
    for (int i = 0; i < 2; ++i) {
      reset(3);
      y[i].resize(kTokens * c.channels * sizeof(T));
      ConvParams p;
      p.batch = {1, query_start, &slot, cursors_.data(), ring_};
      p.channels = p.x_stride = c.channels;
      p.activation_dtype = c.dtype;
      p.x_dtype = i == 0 ? DType::kFloat32 : c.dtype;
      p.x = i == 0 ? static_cast<const void*>(x_.data()) : x.data();
      p.weight = weight_.data();
      p.inputs = inputs_.data();
      p.y = y[i].data();
      cpu::causal_conv(p, pool_);
      inputs[i] = inputs_;
    }
    EXPECT_EQ(y[0], y[1]);
    EXPECT_EQ(inputs[0], inputs[1]);
  });
}

// The baseline: [slots, kernel - 1, channels], shifted by every window and nothing else touched.
TEST_P(Conv, AShiftingWindowMatchesTheDefinition) {
  const auto c = GetParam();
  const auto want = expected();
  const size_t slot_bytes = (c.kernel - 1) * c.channels * dtype_bytes(c.dtype);
  op_ = cpu::shifting_conv;
  for (const int64_t piece : {1, 2, 7}) {
    inputs_.assign(3 * slot_bytes, 0xff);
    std::fill_n(inputs_.begin() + slot_bytes, slot_bytes, 0);
    for (int64_t t = 0; t + piece <= kTokens; t += piece)
      expect_close(run(t, t + piece, x_), want, t);
    for (size_t i = 0; i < slot_bytes; ++i) {
      ASSERT_EQ(inputs_[i], 0xff);
      ASSERT_EQ(inputs_[2 * slot_bytes + i], 0xff);
    }
  }
}

TEST_P(Conv, OtherSlotsStayUntouched) {
  run(0, 20, x_);
  const size_t bytes = inputs_.size() / 3;
  EXPECT_TRUE(
      std::all_of(inputs_.begin(), inputs_.begin() + bytes, [](uint8_t b) { return b == 0xff; }));
  EXPECT_TRUE(
      std::all_of(inputs_.begin() + 2 * bytes, inputs_.end(), [](uint8_t b) { return b == 0xff; }));
}

}  // namespace
}  // namespace replayssm
