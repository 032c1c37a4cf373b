// The convolution over tree windows: taps follow ancestors, then committed inputs.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "core/dispatch.h"
#include "ops/cpu/recurrent.h"
#include "ops/recurrent_inputs.h"
#include "ops/reference/conv.h"
#include "ops/reference/recurrent.h"
#include "replay/cursor.h"

namespace replayssm::testing {
namespace {

struct TreeConvCase {
  int64_t channels;
  int32_t kernel;
  DType dtype;
};

class ConvAncestors : public ::testing::TestWithParam<TreeConvCase> {};

INSTANTIATE_TEST_SUITE_P(Shapes, ConvAncestors,
                         ::testing::Values(TreeConvCase{64, 4, DType::kFloat32},
                                           TreeConvCase{131, 4, DType::kBFloat16},
                                           TreeConvCase{7, 3, DType::kFloat16},
                                           TreeConvCase{5, 1, DType::kFloat32},
                                           TreeConvCase{20, 8, DType::kFloat32}));

// One slot of a pool of two; the other one and all that has not been written is NaN.
template <class T>
class Channels {
 public:
  Channels(const TreeConvCase& c, int32_t max_window)
      : case_(c),
        ring_{.max_window = max_window, .conv_kernel = c.kernel},
        rows_(conv_rows(c.kernel, max_window)),
        inputs_(2 * rows_ * c.channels, T(from_float<T>(kNaN))),
        cursors_(2, reset_cursor(ring_)) {
    for (int64_t row = 0; row + 1 < c.kernel; ++row)
      std::fill_n(input(row), c.channels, from_float<T>(0));
  }

  std::vector<float> run(const std::vector<float>& x, const std::vector<float>& weight,
                         const std::vector<int32_t>& parent) {
    const auto tokens = static_cast<int32_t>(parent.size());
    const int32_t query_start[] = {0, tokens}, slot[] = {1};
    std::vector<T> y(x.size());
    ThreadPool threads(1);
    ConvParams p;
    p.batch = {1, query_start, slot, cursors_.data(), ring_, parent.data()};
    p.channels = case_.channels;
    p.activation_dtype = case_.dtype;
    p.x = x.data();
    p.x_stride = case_.channels;
    p.weight = weight.data();
    p.inputs = inputs_.data();
    p.y = y.data();
    cpu::causal_conv(p, threads);
    std::vector<float> out;
    for (const T value : y) out.push_back(to_float(value));
    return out;
  }
  void commit(const std::vector<int64_t>& path) {
    const int64_t first = cursors_[1].ring_start + cursors_[1].ring_count;
    for (size_t i = 0; i < path.size(); ++i)
      std::copy_n(input(first + path[i]), case_.channels, input(first + static_cast<int64_t>(i)));
    commit_step(cursors_[1], std::ssize(path), Route::kOutputOnly);
    commit_fold(cursors_[1]);
  }

 private:
  T* input(int64_t counter) { return inputs_.data() + (rows_ + counter % rows_) * case_.channels; }

  TreeConvCase case_;
  RingConfig ring_;
  int64_t rows_;
  std::vector<T> inputs_;
  std::vector<Cursor> cursors_;
};

// Random trees of which random paths are accepted, channel by channel against the definition.
TEST_P(ConvAncestors, TapsFollowAncestorsThenCommittedInputs) {
  const auto c = GetParam();
  constexpr int32_t kNodes = 7;
  dispatch_float(c.dtype, [&]<class T>() {
    Channels<T> channels(c, kNodes);
    std::mt19937 random(c.channels);
    std::normal_distribution<float> normal;
    std::vector<float> weight(c.kernel * c.channels);
    for (float& w : weight) w = normal(random);
    std::vector<std::vector<double>> committed(c.channels);
    for (int step = 0; step < 12; ++step) {
      std::vector<int32_t> parent(kNodes);
      for (int32_t i = 0; i < kNodes; ++i) parent[i] = static_cast<int32_t>(random() % (i + 1)) - 1;
      std::vector<float> x(kNodes * c.channels);
      for (float& value : x) value = rounded<T>(normal(random));
      const auto y = channels.run(x, weight, parent);
      auto path = reference::path_to(parent, random() % kNodes);
      path.resize(random() % (path.size() + 1));
      for (int64_t ch = 0; ch < c.channels; ++ch) {
        std::vector<double> taps, window;
        for (int64_t j = 0; j < c.kernel; ++j) taps.push_back(weight[j * c.channels + ch]);
        for (int64_t i = 0; i < kNodes; ++i) window.push_back(x[i * c.channels + ch]);
        for (int64_t i = 0; i < kNodes; ++i) {
          const double want = reference::causal_conv(taps, 0, committed[ch], window, parent, i);
          // Rounding of the result, and of a sum of kernel products of size ~ 3.
          ASSERT_NEAR(y[i * c.channels + ch], want,
                      rounding_error(c.dtype) * std::abs(want) + (c.kernel + 4) * 8 * 0x1p-24)
              << "step " << step << " token " << i << " channel " << ch;
        }
        for (const int64_t i : path) committed[ch].push_back(window[i]);
      }
      channels.commit(path);
    }
  });
}

// A chain given as parents is that chain, bit for bit; and a piece of text taken at once or token
// by token is the same, bit for bit (pitfalls 27: inputs that are unrounded within a window).
TEST_P(ConvAncestors, ChainsHaveTheSameBitsHoweverTheyCome) {
  const auto c = GetParam();
  constexpr int32_t kNodes = 6;
  dispatch_float(c.dtype, [&]<class T>() {
    Channels<T> whole(c, kNodes), single(c, kNodes);
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> weight(c.kernel * c.channels), x(2 * kNodes * c.channels);
    for (float& w : weight) w = normal(random);
    for (float& value : x) value = normal(random);  // not rounded
    for (int half = 0; half < 2; ++half) {
      const auto begin = x.begin() + half * kNodes * c.channels;
      const auto want =
          whole.run({begin, begin + kNodes * c.channels}, weight, {-1, 0, 1, 2, 3, 4});
      whole.commit({0, 1, 2, 3, 4, 5});
      for (int32_t i = 0; i < kNodes; ++i) {
        const auto from = begin + i * c.channels;
        const auto got = single.run({from, from + c.channels}, weight, {-1});
        single.commit({0});
        EXPECT_TRUE(std::equal(got.begin(), got.end(), want.begin() + i * c.channels));
      }
    }
  });
}

}  // namespace
}  // namespace replayssm::testing
