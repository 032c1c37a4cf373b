// Activations, conversions and embeddings: every value on its own.
#include "core/check.h"
#include "core/dispatch.h"
#include "ops/cpu/dense.h"
#include "ops/cpu/parallel_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/elementwise.cc"
#include "hwy/foreach_target.h"
// clang-format off: behind foreach_target.h
#include "ops/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

using namespace replayssm::HWY_NAMESPACE;

// y[r, i] = value(r, i, n) for rows [begin, end) of [rows, dim], vector by vector.
template <class D, class Value>
HWY_INLINE void StoreRows(D d, int64_t begin, int64_t end, int64_t dim, void* y, DType dtype,
                          Value value) {
  dispatch_float(dtype, [&]<class T>() HWY_ATTR {
    for (int64_t r = begin; r < end; ++r) {
      T* row = static_cast<T*>(y) + r * dim;
      ForVectors(d, static_cast<size_t>(dim),
                 [&](size_t i, auto n) HWY_ATTR { StoreF32N(value(r, i, n), d, row + i, n); });
    }
  });
}

void SwigluRows(const float* gate_up, int64_t dim, void* y, DType dtype, int64_t begin,
                int64_t end) {
  const hn::ScalableTag<float> d;
  StoreRows(d, begin, end, dim, y, dtype, [=](int64_t r, size_t i, auto n) HWY_ATTR {
    const float* gate = gate_up + r * 2 * dim + i;
    return hn::Mul(SiluF32(d, LoadF32N(d, gate, n)), LoadF32N(d, gate + dim, n));
  });
}

void ReluSquaredRows(const float* x, int64_t dim, void* y, DType dtype, int64_t begin,
                     int64_t end) {
  const hn::ScalableTag<float> d;
  StoreRows(d, begin, end, dim, y, dtype, [=](int64_t r, size_t i, auto n) HWY_ATTR {
    const auto v = LoadF32N(d, x + r * dim + i, n);
    // v < 0 alone becomes 0, so that NaN stays NaN.
    const auto positive = hn::IfThenZeroElse(hn::Lt(v, hn::Zero(d)), v);
    return hn::Mul(positive, positive);
  });
}

void ConvertRows(const float* x, int64_t x_stride, int64_t dim, void* y, DType dtype, int64_t begin,
                 int64_t end) {
  const hn::ScalableTag<float> d;
  StoreRows(d, begin, end, dim, y, dtype, [=](int64_t r, size_t i, auto n) HWY_ATTR {
    return LoadF32N(d, x + r * x_stride + i, n);
  });
}

void SigmoidGateRows(const float* x, const float* gate, int64_t gate_stride, int64_t dim, void* y,
                     DType dtype, int64_t begin, int64_t end) {
  const hn::ScalableTag<float> d;
  StoreRows(d, begin, end, dim, y, dtype, [=](int64_t r, size_t i, auto n) HWY_ATTR {
    return hn::Mul(LoadF32N(d, x + r * dim + i, n),
                   SigmoidF32(d, LoadF32N(d, gate + r * gate_stride + i, n)));
  });
}

void AddScaled(const float* x, float scale, float* y, int64_t begin, int64_t end) {
  const hn::ScalableTag<float> d;
  const auto s = hn::Set(d, scale);
  ForVectors(d, static_cast<size_t>(end - begin), [&](size_t i, auto n) HWY_ATTR {
    const auto sum = hn::MulAdd(LoadF32N(d, x + begin + i, n), s, LoadF32N(d, y + begin + i, n));
    StoreF32N(sum, d, y + begin + i, n);
  });
}

void ScaleColumns(float* x, int64_t row_stride, const float* scale, int64_t dim, int64_t begin,
                  int64_t end) {
  const hn::ScalableTag<float> d;
  for (int64_t r = begin; r < end; ++r) {
    float* row = x + r * row_stride;
    ForVectors(d, static_cast<size_t>(dim), [&](size_t i, auto n) HWY_ATTR {
      StoreF32N(hn::Mul(LoadF32N(d, row + i, n), LoadF32N(d, scale + i, n)), d, row + i, n);
    });
  }
}

void EmbedRows(const void* table, DType dtype, const int32_t* ids, int64_t dim, float scale,
               float* out, int64_t begin, int64_t end) {
  const hn::ScalableTag<float> d;
  const auto s = hn::Set(d, scale);
  dispatch_float(dtype, [&]<class T>() HWY_ATTR {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = static_cast<const T*>(table) + ids[r] * dim;
      ForVectors(d, static_cast<size_t>(dim), [&](size_t i, auto n) HWY_ATTR {
        StoreF32N(hn::Mul(LoadF32N(d, row + i, n), s), d, out + r * dim + i, n);
      });
    }
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace replayssm::cpu {
namespace {

HWY_EXPORT(SwigluRows);
HWY_EXPORT(ReluSquaredRows);
HWY_EXPORT(ConvertRows);
HWY_EXPORT(SigmoidGateRows);
HWY_EXPORT(AddScaled);
HWY_EXPORT(ScaleColumns);
HWY_EXPORT(EmbedRows);

}  // namespace

void swiglu(const float* gate_up, int64_t rows, int64_t dim, void* y, DType dtype,
            ThreadPool& pool) {
  parallel_rows(pool, rows, dim, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SwigluRows)(gate_up, dim, y, dtype, begin, end);
  });
}

void relu_squared(const float* x, int64_t rows, int64_t dim, void* y, DType dtype,
                  ThreadPool& pool) {
  parallel_rows(pool, rows, dim, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(ReluSquaredRows)(x, dim, y, dtype, begin, end);
  });
}

void add_scaled(const float* x, float scale, int64_t count, float* y, ThreadPool& pool) {
  parallel_rows(pool, count, 1, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(AddScaled)(x, scale, y, begin, end);
  });
}

void scale_columns(float* x, int64_t row_stride, const float* scale, int64_t rows, int64_t dim,
                   ThreadPool& pool) {
  REPLAYSSM_CHECK(rows <= 1 || row_stride >= dim, "row_stride=", row_stride, " dim=", dim);
  parallel_rows(pool, rows, dim, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(ScaleColumns)(x, row_stride, scale, dim, begin, end);
  });
}

void embed(const void* table, DType dtype, const int32_t* ids, int64_t rows, int64_t dim,
           float scale, float* out, ThreadPool& pool) {
  parallel_rows(pool, rows, dim, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(EmbedRows)(table, dtype, ids, dim, scale, out, begin, end);
  });
}

void convert_rows(const float* x, int64_t x_stride, int64_t rows, int64_t dim, void* y, DType dtype,
                  ThreadPool& pool) {
  REPLAYSSM_CHECK(rows <= 1 || x_stride >= dim, "x_stride=", x_stride, " dim=", dim);
  parallel_rows(pool, rows, dim, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(ConvertRows)(x, x_stride, dim, y, dtype, begin, end);
  });
}

void sigmoid_gate(const float* x, const float* gate, int64_t gate_stride, int64_t rows, int64_t dim,
                  void* y, DType dtype, ThreadPool& pool) {
  REPLAYSSM_CHECK(rows <= 1 || gate_stride >= dim, "gate_stride=", gate_stride, " dim=", dim);
  parallel_rows(pool, rows, dim, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SigmoidGateRows)(x, gate, gate_stride, dim, y, dtype, begin, end);
  });
}

}  // namespace replayssm::cpu

#endif  // HWY_ONCE
