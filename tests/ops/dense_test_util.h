// Operands, comparisons and fixtures of the dense ops' tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/thread_pool.h"
#include "hwy/highway.h"
#include "ops/reference/dense.h"

namespace replayssm {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
// Head and group sizes: below, at and between the widths of all instruction sets.
inline constexpr int64_t kDims[] = {1, 7, 64, 80, 96, 128, 192, 256, 1027};

inline std::vector<float> random_values(int64_t count, uint32_t seed, float scale = 1) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (auto& v : values) v = normal(engine);
  return values;
}

inline reference::Values to_double(const std::vector<float>& x) { return {x.begin(), x.end()}; }

// [rows, dim] spread to rows `stride` apart, NaN between.
inline std::vector<float> spread(const std::vector<float>& x, int64_t dim, int64_t stride) {
  std::vector<float> y(x.size() / static_cast<size_t>(dim) * static_cast<size_t>(stride), kNan);
  for (size_t i = 0; i < x.size(); ++i)
    y[i / static_cast<size_t>(dim) * static_cast<size_t>(stride) + i % static_cast<size_t>(dim)] =
        x[i];
  return y;
}

// The values of rows `stride` apart; what lies between must still be NaN.
inline std::vector<float> gather(const std::vector<float>& x, int64_t dim, int64_t stride) {
  std::vector<float> y;
  for (size_t i = 0; i < x.size(); ++i) {
    if (static_cast<int64_t>(i) % stride < dim) {
      y.push_back(x[i]);
    } else {
      EXPECT_TRUE(std::isnan(x[i])) << "wrote between the rows at " << i;
    }
  }
  return y;
}

// Unit roundoff of a format.
inline double unit(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-24 : (dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11);
}

// Each value within `units` fp32 roundings and one rounding to `dtype`; fp16 has subnormals.
inline void expect_close(const std::vector<float>& got, const reference::Values& want, double units,
                         DType dtype = DType::kFloat32) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got[i], want[i],
                std::abs(want[i]) * (units * 0x1p-24 * 1.01 + unit(dtype)) +
                    (dtype == DType::kFloat16 ? 0x1p-25 : 0x1p-126))
        << "at " << i;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  });
}

// What `op(pool, y)` leaves in y, an array of `count` values of `dtype` exactly, as floats. Pools
// of 1, 2 and 3 threads must give the same bits.
inline std::vector<float> run_op(int64_t count, DType dtype,
                                 const std::function<void(ThreadPool&, void*)>& op) {
  std::vector<float> first;
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    std::vector<float> out(static_cast<size_t>(count));
    dispatch_float(dtype, [&]<class T>() {
      std::vector<T> y(static_cast<size_t>(count), from_float<T>(kNan));
      op(pool, y.data());
      for (size_t i = 0; i < y.size(); ++i) out[i] = to_float(y[i]);
    });
    if (threads == 1) first = out;
    EXPECT_TRUE(same_bits(first, out)) << threads << " threads";
  }
  return first;
}

// The same for an op that changes x in place.
inline std::vector<float> run_in_place(const std::vector<float>& x,
                                       const std::function<void(ThreadPool&, float*)>& op) {
  return run_op(static_cast<int64_t>(x.size()), DType::kFloat32, [&](ThreadPool& pool, void* y) {
    std::copy(x.begin(), x.end(), static_cast<float*>(y));
    op(pool, static_cast<float*>(y));
  });
}

// Runs a test on one instruction set after the other.
class PerTarget : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

inline std::string target_name(const ::testing::TestParamInfo<int64_t>& info) {
  return hwy::TargetName(info.param);
}

}  // namespace replayssm
