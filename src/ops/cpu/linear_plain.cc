// Matrix products without a library: row-major weights, one dot product per output.
//
// A block of weight rows meets a block of x rows in registers. Every output is the sum of one fixed
// sequence of products, whatever the blocks.
#include <algorithm>

#include "ops/cpu/linear_slice.h"

#ifndef REPLAYSSM_LINEAR_PLAIN_ONCE
#define REPLAYSSM_LINEAR_PLAIN_ONCE

namespace replayssm::cpu {
namespace {

struct PlainMatrix {
  const void* weights = nullptr;  // [rows, depth]
  const float* bias = nullptr;    // [rows] or null
  int64_t rows = 0;
  int64_t depth = 0;
};

}  // namespace
}  // namespace replayssm::cpu

#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/linear_plain.cc"
#include "hwy/foreach_target.h"
// clang-format off: behind foreach_target.h
#include "ops/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

using namespace replayssm::HWY_NAMESPACE;

// y[m, n] for kM rows of x from m on and kN rows of the weights from n on.
template <int kM, int kN, class T>
void Block(const PlainMatrix& a, const SliceProduct& p, int64_t m, int64_t n) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* x[kM];
  const T* w[kN];
  for (int i = 0; i < kM; ++i) x[i] = static_cast<const T*>(p.x) + (m + i) * p.x_stride;
  for (int j = 0; j < kN; ++j) w[j] = static_cast<const T*>(a.weights) + (n + j) * a.depth;

  hn::Vec<decltype(d)> sum[kM][kN];
  for (auto& row : sum)
    for (auto& v : row) v = hn::Zero(d);
  int64_t k = 0;
  for (; k + lanes <= a.depth; k += lanes) {
    hn::Vec<decltype(d)> wk[kN];
    for (int j = 0; j < kN; ++j) wk[j] = LoadF32(d, w[j] + k);
    for (int i = 0; i < kM; ++i) {
      const auto xk = LoadF32(d, x[i] + k);
      for (int j = 0; j < kN; ++j) sum[i][j] = hn::MulAdd(xk, wk[j], sum[i][j]);
    }
  }
  if (const auto rest = static_cast<size_t>(a.depth - k); rest > 0) {
    for (int i = 0; i < kM; ++i) {
      const auto xk = LoadF32N(d, x[i] + k, rest);
      for (int j = 0; j < kN; ++j)
        sum[i][j] = hn::MulAdd(xk, LoadF32N(d, w[j] + k, rest), sum[i][j]);
    }
  }
  for (int i = 0; i < kM; ++i)
    for (int j = 0; j < kN; ++j)
      p.y[(m + i) * p.y_stride + n + j] = SumF32(d, sum[i][j]) + (a.bias ? a.bias[n + j] : 0.0f);
}

template <int kM, class T>
void Rows(const PlainMatrix& a, const SliceProduct& p, int64_t m, int64_t n, int64_t count) {
  constexpr int kN = kM == 1 ? 8 : 4;
  int64_t j = 0;
  for (; j + kN <= count; j += kN) Block<kM, kN, T>(a, p, m, n + j);
  for (; j < count; ++j) Block<kM, 1, T>(a, p, m, n + j);
}

template <class T>
void Multiply(const PlainMatrix& a, const SliceProduct& p) {
  constexpr int64_t kGroup = 16;  // weight rows that stay in the cache while x passes
  for (int64_t n = 0; n < a.rows; n += kGroup) {
    const int64_t count = HWY_MIN(kGroup, a.rows - n);
    int64_t m = 0;
    for (; m + 4 <= p.rows; m += 4) Rows<4, T>(a, p, m, n, count);
    for (; m < p.rows; ++m) Rows<1, T>(a, p, m, n, count);
  }
}

void MultiplyBf16(const PlainMatrix& a, const SliceProduct& p) { Multiply<bf16>(a, p); }
void MultiplyFloat(const PlainMatrix& a, const SliceProduct& p) { Multiply<float>(a, p); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace replayssm::cpu {
namespace {

HWY_EXPORT(MultiplyBf16);
HWY_EXPORT(MultiplyFloat);

class PlainSlice final : public MatrixSlice {
 public:
  explicit PlainSlice(const SliceSource& source)
      : dtype_(source.dtype),
        rows_(source.rows()),
        depth_(source.in_features),
        weights_(rows_ * depth_ * dtype_bytes(dtype_)),
        bias_(source.bias ? rows_ : 0) {
    source.copy_rows(0, rows_, weights_.as<>());
    if (source.bias) std::copy_n(source.bias + source.begin, rows_, bias_.data());
  }

  int64_t bytes() const override {
    return weights_.bytes() + bias_.size() * static_cast<int64_t>(sizeof(float));
  }

  void apply(const SliceProduct& product, ThreadPool&, int) const override {
    const PlainMatrix matrix{weights_.as<>(), bias_.data(), rows_, depth_};
    if (dtype_ == DType::kBFloat16) {
      HWY_DYNAMIC_DISPATCH(MultiplyBf16)(matrix, product);
    } else {
      HWY_DYNAMIC_DISPATCH(MultiplyFloat)(matrix, product);
    }
  }

 private:
  DType dtype_;
  int64_t rows_;
  int64_t depth_;
  Buffer weights_;
  Array<float> bias_;
};

}  // namespace

std::unique_ptr<MatrixSlice> make_plain_slice(const SliceSource& source) {
  return std::make_unique<PlainSlice>(source);
}

}  // namespace replayssm::cpu

#endif  // HWY_ONCE
