// Tree windows of the convolution: taps follow ancestors, then the committed inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/dispatch.h"
#include "ops/cpu/recurrent.h"
#include "ops/cpu/slots.h"
#include "ops/reference/conv.h"
#include "replay/cursor.h"

namespace replayssm {
namespace {

struct TreeCase {
  int64_t channels;
  int32_t kernel;
  DType dtype;
};

class ConvTree : public ::testing::TestWithParam<TreeCase> {
 protected:
  static constexpr int32_t kNodes = 7;

  ConvTree()
      : ring_{.buffer_len = 4, .max_window = kNodes, .conv_kernel = GetParam().kernel},
        weight_(values(ring_.conv_kernel * GetParam().channels)),
        bias_(values(GetParam().channels)) {
    const int64_t row = GetParam().channels * dtype_bytes(GetParam().dtype);
    inputs_.assign(conv_rows(ring_.conv_kernel, kNodes) * row, 0);
  }

  std::vector<float> values(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> x(count);
    for (float& value : x) {
      value = normal(random_);
      dispatch_float(GetParam().dtype, [&]<class T>() { value = rounded<T>(value); });
    }
    return x;
  }

  // x: [tokens, channels]; returns the outputs as floats.
  std::vector<float> run(const std::vector<float>& x, const std::vector<int32_t>& parent) {
    const auto c = GetParam();
    const int32_t tokens = static_cast<int32_t>(x.size() / c.channels), slot = 0;
    const int32_t query_start[] = {0, tokens};
    std::vector<uint8_t> y(x.size() * dtype_bytes(c.dtype), 0xff);
    begin_step(cursor_, tokens, ring_);
    ConvParams p;
    p.batch = {1, query_start, &slot, &cursor_, ring_, parent.empty() ? nullptr : parent.data()};
    p.channels = c.channels;
    p.activation_dtype = c.dtype;
    p.x = x.data();
    p.x_stride = c.channels;
    p.weight = weight_.data();
    p.bias = bias_.data();
    p.inputs = inputs_.data();
    p.y = y.data();
    cpu::causal_conv(p, pool_);
    std::vector<float> out(x.size());
    dispatch_float(c.dtype, [&]<class T>() {
      for (size_t i = 0; i < out.size(); ++i) out[i] = to_float(reinterpret_cast<T*>(y.data())[i]);
    });
    return out;
  }

  // The accepted path of a tree becomes the first rows of the window.
  void commit(std::vector<int32_t> path) {
    const int32_t slot = 0, query_start[] = {0, kNodes};
    const auto accepted = static_cast<int32_t>(path.size());
    path.resize(kNodes, -9);
    CompactParams p;
    p.shape = {.heads = 1, .key_heads = 1, .head_dim = 1, .state_dim = 1};
    p.batch = {1, query_start, &slot, &cursor_, ring_};
    float checkpoint = 0;
    p.state.checkpoint = &checkpoint;
    p.state.activation_dtype = GetParam().dtype;
    p.conv_inputs = inputs_.data();
    p.channels = GetParam().channels;
    p.path = path.data();
    p.accepted = &accepted;
    cpu::compact(p, pool_);
    commit_step(cursor_, accepted, Route::kOutputOnly);
  }

  std::mt19937 random_{3};
  ThreadPool pool_{2};
  RingConfig ring_;
  std::vector<float> weight_, bias_;
  std::vector<uint8_t> inputs_;
  Cursor cursor_ = reset_cursor(ring_);
};

INSTANTIATE_TEST_SUITE_P(
    Shapes, ConvTree,
    ::testing::Values(TreeCase{64, 4, DType::kFloat32}, TreeCase{131, 4, DType::kBFloat16},
                      TreeCase{7, 3, DType::kFloat16}, TreeCase{3, 1, DType::kFloat32},
                      TreeCase{20, 8, DType::kFloat32}, TreeCase{300, 2, DType::kFloat32}));

TEST_P(ConvTree, TapsFollowAncestorsThenCommittedInputs) {
  const auto c = GetParam();
  std::vector<float> committed;  // [tokens, channels]
  const double half_ulp = c.dtype == DType::kFloat32   ? 0x1p-24
                          : c.dtype == DType::kFloat16 ? 0x1p-11
                                                       : 0x1p-8;
  for (int step = 0; step < 12; ++step) {
    const auto x = values(kNodes * c.channels);
    std::vector<int32_t> parent(kNodes);
    for (int32_t i = 0; i < kNodes; ++i) parent[i] = static_cast<int32_t>(random_() % (i + 1)) - 1;
    const auto y = run(x, parent);
    const auto column = [&](const std::vector<float>& rows, int64_t ch) {
      std::vector<double> values;
      for (size_t i = ch; i < rows.size(); i += c.channels) values.push_back(rows[i]);
      return values;
    };
    for (int64_t ch = 0; ch < c.channels; ++ch) {
      const auto weight = column(weight_, ch), before = column(committed, ch),
                 window = column(x, ch);
      for (int64_t i = 0; i < kNodes; ++i) {
        const double want = reference::causal_conv(weight, bias_[ch], before, window, parent, i);
        ASSERT_NEAR(y[i * c.channels + ch], want,
                    half_ulp * std::abs(want) + (c.kernel + 4) * 8 * 0x1p-24)
            << "step " << step << " token " << i;
      }
    }
    // Any path from the root is accepted, or nothing.
    std::vector<int32_t> path;
    for (int32_t i = static_cast<int32_t>(random_() % (kNodes + 1)) - 1; i >= 0; i = parent[i])
      path.insert(path.begin(), i);
    commit(path);
    for (const int32_t i : path)
      committed.insert(committed.end(), x.begin() + i * c.channels,
                       x.begin() + (i + 1) * c.channels);
  }
}

TEST_P(ConvTree, AChainIsTheSameWithAndWithoutParents) {
  const auto x = values(kNodes * GetParam().channels);
  std::vector<int32_t> parent(kNodes);
  for (int32_t i = 0; i < kNodes; ++i) parent[i] = i - 1;
  const auto inputs = inputs_;
  const auto with = run(x, parent);
  const auto kept = inputs_;
  inputs_ = inputs;
  EXPECT_EQ(with, run(x, {}));
  EXPECT_EQ(kept, inputs_);
}

}  // namespace
}  // namespace replayssm
