// RMS normalisations: one pass for the sum of squares, one for the scaled values.
#include <cmath>

#include "core/check.h"
#include "core/dispatch.h"
#include "ops/cpu/dense.h"
#include "ops/cpu/parallel_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/norms.cc"
#include "hwy/foreach_target.h"
// clang-format off: behind foreach_target.h
#include "ops/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

using namespace replayssm::HWY_NAMESPACE;

// 1 / sqrt(mean(value(i, n)^2) + eps) over `dim` values given vector by vector.
template <class D, class Value>
HWY_INLINE float InverseRms(D d, int64_t dim, float eps, Value&& value) {
  auto sum = hn::Zero(d);
  ForVectors(d, static_cast<size_t>(dim), [&](size_t i, auto n) HWY_ATTR {
    const auto v = value(i, n);
    sum = hn::MulAdd(v, v, sum);
  });
  return 1.0f / std::sqrt(SumF32(d, sum) / static_cast<float>(dim) + eps);
}

template <class T>
void NormRow(const float* x, const float* weight, int64_t dim, float eps, T* y) {
  const hn::ScalableTag<float> d;
  const auto scale = hn::Set(
      d, InverseRms(d, dim, eps, [&](size_t i, auto n) HWY_ATTR { return LoadF32N(d, x + i, n); }));
  ForVectors(d, static_cast<size_t>(dim), [&](size_t i, auto n) HWY_ATTR {
    const auto v = hn::Mul(LoadF32N(d, x + i, n), scale);
    StoreF32N(hn::Mul(v, LoadF32N(d, weight + i, n)), d, y + i, n);
  });
}

void NormRows(const float* x, const float* weight, int64_t dim, float eps, void* y, DType dtype,
              int64_t begin, int64_t end) {
  dispatch_float(dtype, [&]<class T>() {
    for (int64_t r = begin; r < end; ++r)
      NormRow(x + r * dim, weight, dim, eps, static_cast<T*>(y) + r * dim);
  });
}

void NormHeads(float* x, int64_t row_stride, const float* weight, int64_t heads, int64_t dim,
               float eps, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r)
    for (int64_t h = 0; h < heads; ++h) {
      float* head = x + r * row_stride + h * dim;
      NormRow(head, weight, dim, eps, head);
    }
}

template <GateActivation kActivation, class D>
HWY_INLINE hn::Vec<D> Activate(D d, hn::Vec<D> v) {
  return kActivation == GateActivation::kSilu ? SiluF32(d, v) : SigmoidF32(d, v);
}

// One group: `weight` may be null, then only the gate applies.
template <GateActivation kActivation, class T>
void GatedNormGroup(const GatedNormParams& p, const float* x, const float* gate,
                    const float* weight, T* y) {
  const hn::ScalableTag<float> d;
  const auto load = [&](size_t i, auto n) HWY_ATTR { return LoadF32N(d, x + i, n); };
  const auto load_gated = [&](size_t i, auto n) HWY_ATTR {
    return hn::Mul(load(i, n), Activate<kActivation>(d, LoadF32N(d, gate + i, n)));
  };
  const float inverse_rms = !weight        ? 1.0f
                            : p.gate_first ? InverseRms(d, p.group_dim, p.eps, load_gated)
                                           : InverseRms(d, p.group_dim, p.eps, load);
  const auto scale = hn::Set(d, inverse_rms);
  ForVectors(d, static_cast<size_t>(p.group_dim), [&](size_t i, auto n) HWY_ATTR {
    if (!weight) {
      StoreF32N(load_gated(i, n), d, y + i, n);
      return;
    }
    const auto w = LoadF32N(d, weight + i, n);
    if (p.gate_first) {
      StoreF32N(hn::Mul(hn::Mul(load_gated(i, n), scale), w), d, y + i, n);
    } else {
      const auto normed = hn::Mul(hn::Mul(load(i, n), scale), w);
      const auto g = Activate<kActivation>(d, LoadF32N(d, gate + i, n));
      StoreF32N(hn::Mul(normed, g), d, y + i, n);
    }
  });
}

// Groups [begin, end) of all rows' groups in order.
void GatedNormGroups(const GatedNormParams& p, int64_t begin, int64_t end) {
  dispatch_float(p.dtype, [&]<class T>() {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / p.groups, channel = i % p.groups * p.group_dim;
      const float* gate = p.gate + row * p.gate_stride + channel;
      const float* weight = p.weight && !p.weight_per_group ? p.weight + channel : p.weight;
      const int64_t offset = i * p.group_dim;
      auto* y = static_cast<T*>(p.y) + offset;
      if (p.activation == GateActivation::kSilu) {
        GatedNormGroup<GateActivation::kSilu>(p, p.x + offset, gate, weight, y);
      } else {
        GatedNormGroup<GateActivation::kSigmoid>(p, p.x + offset, gate, weight, y);
      }
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

HWY_EXPORT(NormRows);
HWY_EXPORT(NormHeads);
HWY_EXPORT(GatedNormGroups);

}  // namespace

void rms_norm(const float* x, const float* weight, int64_t rows, int64_t dim, float eps, void* y,
              DType dtype, ThreadPool& pool) {
  parallel_rows(pool, rows, dim, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(NormRows)(x, weight, dim, eps, y, dtype, begin, end);
  });
}

void head_rms_norm(float* x, int64_t row_stride, const float* weight, int64_t rows, int64_t heads,
                   int64_t dim, float eps, ThreadPool& pool) {
  REPLAYSSM_CHECK(rows <= 1 || row_stride >= heads * dim, "row_stride=", row_stride,
                  " heads=", heads, " dim=", dim);
  parallel_rows(pool, rows, heads * dim, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(NormHeads)(x, row_stride, weight, heads, dim, eps, begin, end);
  });
}

void gated_rms_norm(const GatedNormParams& params, ThreadPool& pool) {
  REPLAYSSM_CHECK(params.rows <= 1 || params.gate_stride >= params.groups * params.group_dim,
                  "gate_stride=", params.gate_stride, " groups=", params.groups,
                  " group_dim=", params.group_dim);
  parallel_rows(pool, params.rows * params.groups, params.group_dim,
                [&](int64_t begin, int64_t end) {
                  HWY_DYNAMIC_DISPATCH(GatedNormGroups)(params, begin, end);
                });
}

}  // namespace replayssm::cpu

#endif  // HWY_ONCE
