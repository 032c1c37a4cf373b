// Steps of one token a sequence, which have a kernel of their own, against the kernel of windows
// (conv_test.cc holds that one to the definition): the same bits.
#include <cstring>
#include <numeric>
#include <random>

#include "core/dispatch.h"
#include "ops/cuda/conv.h"
#include "ops/cuda/launches.h"
#include "replay/step_plan.h"

namespace replayssm::testing {
namespace {

struct TokenCase {
  int64_t sequences, channels;
  DType dtype, x_dtype;
  bool bias;
  int32_t kernel = 4;
};

template <class T>
std::vector<uint8_t> bytes_of(const std::vector<T>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

class CudaConvTokens : public ::testing::TestWithParam<TokenCase> {
 protected:
  std::vector<float> normal(int64_t count) {
    std::normal_distribution<float> distribution;
    std::vector<float> values(count);
    for (float& value : values) value = distribution(random_);
    return values;
  }
  std::vector<uint8_t> normal_bytes(int64_t count, DType dtype) {
    std::vector<uint8_t> bytes;
    dispatch_float(dtype, [&]<class T>() {
      std::vector<T> values;
      for (const float x : normal(count)) values.push_back(from_float<T>(x));
      bytes = bytes_of(values);
    });
    return bytes;
  }

  // In slots in no order, every fifth without a slot, every seventh without a token; their places
  // in cursors and in a plan of another order.
  void make_sequences() {
    slot_.resize(c_.sequences);
    std::iota(slot_.begin(), slot_.end(), 0);
    std::shuffle(slot_.begin(), slot_.end(), random_);
    cursors_.resize(c_.sequences);
    for (int32_t s = 0; s < c_.sequences; ++s) {
      int32_t& slot = slot_[s];
      const int32_t window = s % 7 == 6 ? 0 : 1, token = start_.back();
      if (s % 5 == 4) {
        slot = -1;
        plan_.push_back({.sequence = s, .slot = slot, .token = token, .window = window});
      } else {
        const int64_t counter = int64_t{static_cast<uint32_t>(random_())} * 1001;
        cursors_[slot] = {.ring_start = counter, .ring_count = 3, .ring_limit = 4};
        plan_.push_back(plan_sequence(s, slot, token, window, cursors_[slot], ring_));
      }
      start_.push_back(token + window);
    }
    std::shuffle(plan_.begin(), plan_.end(), random_);
  }

  const TokenCase c_ = GetParam();
  const RingConfig ring_{.buffer_len = 4, .max_window = 2, .conv_kernel = c_.kernel};
  std::vector<int32_t> start_{0}, slot_;
  std::vector<Cursor> cursors_;
  std::vector<SequencePlan> plan_;
  std::mt19937 random_{static_cast<uint32_t>(c_.channels + c_.sequences)};
};

constexpr DType kSingle = DType::kFloat32, kBf = DType::kBFloat16, kHalf = DType::kFloat16;
INSTANTIATE_TEST_SUITE_P(Shapes, CudaConvTokens,
                         ::testing::Values(TokenCase{1, 8192, kBf, kSingle, false},
                                           TokenCase{3, 128, kBf, kBf, true},
                                           TokenCase{131, 2048, kBf, kSingle, true},
                                           TokenCase{64, 256, kHalf, kSingle, false},
                                           TokenCase{130, 384, kHalf, kHalf, true},
                                           TokenCase{33, 640, kSingle, kSingle, true},
                                           TokenCase{6, 128, kSingle, kSingle, false},
                                           TokenCase{7, 136, kBf, kSingle, true},
                                           TokenCase{9, 40, kBf, kSingle, true, 3},
                                           TokenCase{5, 24, kSingle, kSingle, false, 1}));

TEST_P(CudaConvTokens, AreWindowsBitForBit) {
  REQUIRE_DEVICE();
  constexpr int64_t kGap = 8;
  make_sequences();
  const int64_t n = c_.sequences, stride = c_.channels + kGap, tokens = start_[n];
  const int64_t rows = conv_rows(ring_.conv_kernel, ring_.max_window);
  const DeviceArray<uint8_t> x(normal_bytes((tokens + 1) * stride, c_.x_dtype));
  const DeviceArray<float> weight(normal(c_.kernel * c_.channels)), bias(normal(c_.channels));
  const DeviceArray<int32_t> device_start(start_), device_slot(slot_);
  const DeviceArray<Cursor> device_cursors(cursors_);
  const DeviceArray<SequencePlan> device_plan(plan_);
  const auto kept = normal_bytes(n * rows * c_.channels, c_.dtype);

  const std::vector<uint8_t> untouched((tokens + 1) * c_.channels * dtype_bytes(c_.dtype), 0xff);
  const auto run = [&](bool planned, int64_t longest_window) {
    const DeviceArray<uint8_t> inputs(kept), y(untouched);
    ConvParams p;
    p.batch = {n, device_start.data(), device_slot.data(), device_cursors.data(), ring_};
    p.batch.plan = planned ? device_plan.data() : nullptr;
    p.channels = c_.channels;
    p.activation_dtype = c_.dtype;
    p.x_dtype = c_.x_dtype;
    p.x = x.data();
    p.x_stride = stride;
    p.weight = weight.data();
    p.bias = c_.bias ? bias.data() : nullptr;
    p.inputs = inputs.data();
    p.y = y.data();
    run_call([&](cudaStream_t stream) { cuda::causal_conv(p, longest_window, stream); });
    std::pair<std::vector<uint8_t>, std::vector<uint8_t>> result;
    y.download(result.first);
    inputs.download(result.second);
    return result;
  };
  const auto [y, inputs] = run(false, 2);
  EXPECT_NE(inputs, kept);
  for (const bool planned : {false, true}) {
    const auto [tokens_y, tokens_inputs] = run(planned, 1);
    EXPECT_TRUE(tokens_y == y) << planned;
    EXPECT_TRUE(tokens_inputs == inputs) << planned;
  }
}

}  // namespace
}  // namespace replayssm::testing
