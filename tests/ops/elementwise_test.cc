#include "ops/cpu/dense.h"
#include "ops/dense_test_util.h"
#include "replayssm/error.h"

namespace replayssm::cpu {
namespace {

class Elementwise : public PerTarget {};

INSTANTIATE_TEST_SUITE_P(Targets, Elementwise,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()), target_name);

constexpr int64_t kRows = 23;

TEST_P(Elementwise, Swiglu) {
  for (const int64_t dim : kDims)
    for (const DType dtype : kDtypes) {
      const auto x = random_values(kRows * 2 * dim, 1, 4);
      const auto y = run_op(kRows * dim, dtype, [&](ThreadPool& pool, void* out) {
        swiglu(x.data(), kRows, dim, out, dtype, pool);
      });
      expect_close(y, reference::swiglu(to_double(x), kRows, dim), 10, dtype);
    }
}

TEST_P(Elementwise, ReluSquared) {
  for (const int64_t dim : kDims)
    for (const DType dtype : kDtypes) {
      const auto x = random_values(kRows * dim, 2, 4);
      const auto y = run_op(kRows * dim, dtype, [&](ThreadPool& pool, void* out) {
        relu_squared(x.data(), kRows, dim, out, dtype, pool);
      });
      expect_close(y, reference::relu_squared(to_double(x)), 1, dtype);
    }
}

TEST_P(Elementwise, ReluSquaredKeepsNan) {
  const float x[] = {kNan, -1, 2};
  float y[3];
  ThreadPool pool(1);
  relu_squared(x, 1, 3, y, DType::kFloat32, pool);
  EXPECT_TRUE(std::isnan(y[0]));
  EXPECT_EQ(y[1], 0);
  EXPECT_EQ(y[2], 4);
}

TEST_P(Elementwise, SigmoidGate) {
  for (const int64_t dim : kDims)
    for (const DType dtype : kDtypes) {
      const auto x = random_values(kRows * dim, 3), gate = random_values(kRows * dim, 4, 5);
      const auto gate_rows = spread(gate, dim, dim + 9);
      const auto y = run_op(kRows * dim, dtype, [&](ThreadPool& pool, void* out) {
        sigmoid_gate(x.data(), gate_rows.data(), dim + 9, kRows, dim, out, dtype, pool);
      });
      expect_close(y, reference::sigmoid_gate(to_double(x), to_double(gate)), 10, dtype);
    }
}

TEST_P(Elementwise, AddScaled) {
  for (const int64_t count : {0, 1, 17, 4096, 20011}) {
    const auto x = random_values(count, 5), y = random_values(count, 6);
    const auto got = run_in_place(
        y, [&](ThreadPool& pool, float* at) { add_scaled(x.data(), 0.3f, count, at, pool); });
    for (size_t i = 0; i < got.size(); ++i) {
      const double product = double{0.3f} * x[i];
      // One rounding of the sum and, without a fused product, one of the product.
      EXPECT_NEAR(got[i], product + y[i],
                  0x1p-24 * (std::abs(product) + std::abs(product + y[i])) * 1.01);
    }
  }
}

// One rounding, and what lies between the rows stays.
TEST_P(Elementwise, ScaleColumns) {
  for (const int64_t dim : kDims) {
    const auto x = random_values(kRows * dim, 11), scale = random_values(dim, 12);
    const auto rows = run_in_place(spread(x, dim, dim + 5), [&](ThreadPool& pool, float* at) {
      scale_columns(at, dim + 5, scale.data(), kRows, dim, pool);
    });
    const auto got = gather(rows, dim, dim + 5);
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(got[i], x[i] * scale[i % static_cast<size_t>(dim)]) << i;
  }
}

TEST_P(Elementwise, Embed) {
  for (const int64_t dim : kDims)
    for (const DType dtype : kDtypes) {
      const std::vector<int32_t> ids = {4, 0, 4, 2};
      const auto table = random_values(5 * dim, 7);
      reference::Values want;
      dispatch_float(dtype, [&]<class T>() {
        std::vector<T> typed;
        for (const float v : table) typed.push_back(from_float<T>(v));
        for (const int32_t id : ids)
          for (int64_t i = 0; i < dim; ++i)
            want.push_back(1.5 * to_float(typed[static_cast<size_t>(id * dim + i)]));
        const auto y = run_op(4 * dim, DType::kFloat32, [&](ThreadPool& pool, void* out) {
          embed(typed.data(), dtype, ids.data(), 4, dim, 1.5f, static_cast<float*>(out), pool);
        });
        expect_close(y, want, 1);
      });
    }
}

TEST_P(Elementwise, ConvertRowsRoundsToNearestEven) {
  for (const int64_t dim : kDims)
    for (const DType dtype : kDtypes) {
      const auto x = random_values(kRows * dim, 8, 100);
      const auto x_rows = spread(x, dim, dim + 1);
      const auto y = run_op(kRows * dim, dtype, [&](ThreadPool& pool, void* out) {
        convert_rows(x_rows.data(), dim + 1, kRows, dim, out, dtype, pool);
      });
      dispatch_float(dtype, [&]<class T>() {
        for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(y[i], rounded<T>(x[i])) << i;
      });
    }
}

TEST_P(Elementwise, Rotary) {
  struct Case {
    int64_t heads, dim, rotary_dim;
  };
  for (const auto [heads, dim, rotary_dim] :
       {Case{1, 2, 2}, Case{3, 64, 64}, Case{2, 80, 20}, Case{2, 7, 6}, Case{4, 256, 64},
        Case{1, 96, 96}, Case{1, 5, 0}}) {
    const std::vector<int64_t> position = {0, 1, 77, 4095, 262143};
    std::vector<float> frequency;
    for (int64_t i = 0; i < rotary_dim / 2; ++i)
      frequency.push_back(
          std::pow(1e7f, -2 * static_cast<float>(i) / static_cast<float>(rotary_dim)));
    const int64_t stride = heads * dim + 3;
    const auto x = random_values(5 * heads * dim, 9);
    const auto y = run_in_place(spread(x, heads * dim, stride), [&](ThreadPool& pool, float* at) {
      rotary(at, stride, position.data(), frequency.data(), 5, heads, dim, rotary_dim, pool);
    });
    const auto got = gather(y, heads * dim, stride);
    const auto want =
        reference::rotary(to_double(x), position, frequency, 5, heads, dim, rotary_dim);
    for (size_t i = 0; i < got.size(); ++i) {
      const auto in_head = static_cast<int64_t>(i) % dim;
      if (in_head >= rotary_dim) {
        ASSERT_EQ(got[i], x[i]) << "not rotated";
        continue;
      }
      // Sine and cosine within 1 ulp, two products, one sum.
      const size_t partner = in_head < rotary_dim / 2 ? i + static_cast<size_t>(rotary_dim / 2)
                                                      : i - static_cast<size_t>(rotary_dim / 2);
      ASSERT_NEAR(got[i], want[i], 5 * 0x1p-24 * (std::abs(x[i]) + std::abs(x[partner])));
    }
  }
}

TEST(ElementwiseContracts, MisuseIsRefused) {
  ThreadPool pool(1);
  std::vector<float> x(64);
  const int64_t position[2] = {};
  EXPECT_THROW(rotary(x.data(), 8, position, x.data(), 2, 1, 8, 7, pool), Error);
  EXPECT_THROW(rotary(x.data(), 8, position, x.data(), 2, 1, 8, 10, pool), Error);
  EXPECT_THROW(rotary(x.data(), 7, position, x.data(), 2, 1, 8, 8, pool), Error);
  EXPECT_THROW(convert_rows(x.data(), 3, 2, 4, x.data(), DType::kFloat32, pool), Error);
  EXPECT_THROW(scale_columns(x.data(), 3, x.data(), 2, 4, pool), Error);
  EXPECT_THROW(sigmoid_gate(x.data(), x.data(), 3, 2, 4, x.data(), DType::kFloat32, pool), Error);
}

}  // namespace
}  // namespace replayssm::cpu
