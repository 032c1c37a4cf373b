// The causal depthwise convolution in front of a recurrent layer. A block of work is a range of
// channels of one sequence: it reads the inputs before the window first and stores the window's own
// last, so a long prompt may overwrite the rows it started from.

#include <algorithm>

#include "core/check.h"
#include "core/dispatch.h"
#include "ops/check_params.h"
#include "ops/cpu/recurrent.h"
#include "replay/cursor.h"

#ifndef REPLAYSSM_CONV_ONCE
#define REPLAYSSM_CONV_ONCE

namespace replayssm {
namespace {

// Where a slot's earlier inputs lie: by their counter, or the last ones from the oldest on.
enum class ConvInputs : uint8_t { kCounted, kShifting };

}  // namespace
}  // namespace replayssm

#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/conv.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {
namespace {

// Four taps (every published model) keep their inputs in registers. X: the type of x.
template <class T, class X, int64_t kTaps>
class ConvColumn {
 public:
  ConvColumn(const ConvParams& params, ConvInputs kind, int64_t sequence, int64_t channel)
      : p_(params),
        shifting_(kind == ConvInputs::kShifting),
        taps_(kTaps > 0 ? kTaps : params.batch.ring.conv_kernel),
        rows_(shifting_ ? taps_ - 1 : conv_rows(taps_, params.batch.ring.max_window)),
        channel_(channel),
        lanes_(std::min<int64_t>(hn::MaxLanes(D()), params.channels - channel)) {
    const auto& batch = params.batch;
    slot_ = batch.slot[sequence];
    first_ = batch.query_start[sequence];
    window_ = batch.query_start[sequence + 1] - first_;
    if (batch.parent != nullptr) parent_ = batch.parent + first_;
    if (shifting_) {
      counter_ = rows_;  // the oldest input lies in row 0
    } else if (slot_ >= 0) {
      counter_ = batch.cursors[slot_].ring_start + batch.cursors[slot_].ring_count;
    }
  }

  void run() {
    const D d;
    if (slot_ < 0) {
      for (int64_t i = 0; i < window_; ++i) store(hn::Zero(d), output(i));
      return;
    }
    hn::Vec<D> weight[kMaxConvKernel];
    for (int64_t j = 0; j < taps_; ++j) weight[j] = load(p_.weight + j * p_.channels + channel_);
    const auto bias = p_.bias ? load(p_.bias + channel_) : hn::Zero(d);
    if (parent_ != nullptr) {
      run_tree(weight, bias);
    } else {
      run_chain(weight, bias);
    }
    if (shifting_) return;
    // A decode window may be rolled back, so all of it is kept beside what preceded it.
    const int64_t keep =
        window_ <= p_.batch.ring.max_window ? window_ : std::min(window_, taps_ - 1);
    for (int64_t i = window_ - keep; i < window_; ++i) store(load(input(i)), kept(i));
  }

 private:
  using D = hn::ScalableTag<float>;

  HWY_INLINE void run_chain(const hn::Vec<D>* weight, hn::Vec<D> bias) {
    hn::Vec<D> input[kMaxConvKernel];
    for (int64_t j = 0; j + 1 < taps_; ++j) input[j] = load(kept(j + 1 - taps_));
    for (int64_t i = 0; i < window_; ++i) {
      input[taps_ - 1] = fresh(i);
      auto sum = bias;
      for (int64_t j = 0; j < taps_; ++j) sum = hn::MulAdd(weight[j], input[j], sum);
      store(SiluF32(D(), sum), output(i));
      for (int64_t j = 0; j + 1 < taps_; ++j) input[j] = input[j + 1];
    }
    if (!shifting_) return;
    for (int64_t j = 0; j + 1 < taps_; ++j) store(input[j], kept(j + 1 - taps_));
  }

  // Sums in the same order, so that a chain is the same with and without parents.
  void run_tree(const hn::Vec<D>* weight, hn::Vec<D> bias) {
    for (int64_t i = 0; i < window_; ++i) {
      hn::Vec<D> input[kMaxConvKernel];
      int64_t row = i;  // of the window, or, below 0, behind the last committed input
      for (int64_t j = taps_ - 1; j >= 0; --j) {
        input[j] = row >= 0 ? fresh(row) : load(kept(row));
        row = row >= 0 ? parent_[row] : row - 1;
      }
      auto sum = bias;
      for (int64_t j = 0; j < taps_; ++j) sum = hn::MulAdd(weight[j], input[j], sum);
      store(SiluF32(D(), sum), output(i));
    }
  }

  // The window's input i.
  HWY_INLINE hn::Vec<D> fresh(int64_t i) const { return RoundF32(D(), load(input(i)), T()); }
  const X* input(int64_t i) const {
    return static_cast<const X*>(p_.x) + (first_ + i) * p_.x_stride + channel_;
  }

  T* kept(int64_t i) const {
    return static_cast<T*>(p_.inputs) + (slot_ * rows_ + (counter_ + i) % rows_) * p_.channels +
           channel_;
  }
  T* output(int64_t i) const {
    return static_cast<T*>(p_.y) + (first_ + i) * p_.channels + channel_;
  }
  template <class U>
  hn::Vec<D> load(const U* p) const {
    return LoadF32N(D(), p, static_cast<size_t>(lanes_));
  }
  void store(hn::Vec<D> v, T* p) const { StoreF32N(v, D(), p, static_cast<size_t>(lanes_)); }

  const ConvParams& p_;
  const int32_t* parent_ = nullptr;  // of this window; null: a chain
  bool shifting_;
  int64_t taps_, rows_, channel_, lanes_;
  int64_t slot_ = -1, first_ = 0, window_ = 0, counter_ = 0;
};

template <class T, class X>
void conv_column(const ConvParams& params, ConvInputs kind, int64_t sequence, int64_t channel) {
  if (params.batch.ring.conv_kernel == 4) {
    ConvColumn<T, X, 4>(params, kind, sequence, channel).run();
  } else {
    ConvColumn<T, X, 0>(params, kind, sequence, channel).run();
  }
}

// Channels [begin, end) of one sequence.
void conv_channels(const ConvParams& params, ConvInputs kind, int64_t sequence, int64_t begin,
                   int64_t end) {
  const int64_t lanes = hn::MaxLanes(hn::ScalableTag<float>());
  dispatch_float(params.activation_dtype, [&]<class T>() {
    for (int64_t channel = begin; channel < end; channel += lanes) {
      if (params.x_dtype == DType::kFloat32) {
        conv_column<T, float>(params, kind, sequence, channel);
      } else {
        conv_column<T, T>(params, kind, sequence, channel);
      }
    }
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {

HWY_EXPORT(conv_channels);

namespace cpu {

namespace {

void run(const ConvParams& params, ConvInputs kind, ThreadPool& pool) {
  constexpr int64_t kBlock = 128;
  const auto& batch = params.batch;
  const auto kernel = HWY_DYNAMIC_DISPATCH(conv_channels);
  const int64_t blocks = (params.channels + kBlock - 1) / kBlock;
  pool.for_ranges(batch.sequences * blocks, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t channel = i % blocks * kBlock;
      kernel(params, kind, i / blocks, channel, std::min(channel + kBlock, params.channels));
    }
  });
}

}  // namespace

void causal_conv(const ConvParams& params, ThreadPool& pool) {
  check_params(params);
  const WindowUse use = params.batch.parent != nullptr ? WindowUse::kDecode : WindowUse::kAny;
  check_windows(params.batch, use);
  debug_check(params.batch, use);
  run(params, ConvInputs::kCounted, pool);
}

void shifting_conv(const ConvParams& params, ThreadPool& pool) {
  check_params(params);
  REPLAYSSM_CHECK(params.batch.parent == nullptr, "windows are chains");
  check_windows(params.batch, WindowUse::kAny);
  run(params, ConvInputs::kShifting, pool);
}

}  // namespace cpu
}  // namespace replayssm
#endif  // HWY_ONCE
