#include "ops/cpu/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "core/buffer.h"
#include "core/dispatch.h"
#include "ops/cpu/linear_slice.h"
#include "replayssm/error.h"

namespace replayssm::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> random_values(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (auto& v : values) v = normal(engine);
  return values;
}

// `values` in memory as `dtype`, and the same rounded through it.
struct Typed {
  Buffer memory;
  std::vector<float> values;

  Typed(std::vector<float> v, DType dtype)
      : memory(static_cast<int64_t>(v.size()) * dtype_bytes(dtype)), values(std::move(v)) {
    dispatch_float(dtype, [&]<class T>() {
      for (size_t i = 0; i < values.size(); ++i) {
        memory.as<T>()[i] = from_float<T>(values[i]);
        values[i] = to_float(memory.as<T>()[i]);
      }
    });
  }
};

void round_through(std::vector<float>& values, DType dtype) {
  values = Typed(std::move(values), dtype).values;
}

struct Case {
  std::vector<int64_t> blocks;  // rows of each
  int64_t in_features;
  DType source;
  DType dtype;
  bool bias;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  for (auto rows : c.blocks) out << rows << "+";
  return out << " x " << c.in_features << " " << dtype_name(c.source) << " as "
             << dtype_name(c.dtype) << (c.bias ? " bias" : "");
}

// A matrix of stacked blocks, its values as the product should see them.
struct Matrix {
  std::vector<Typed> sources;
  std::vector<WeightRows> blocks;
  std::vector<float> values;
  std::vector<float> bias;
  int64_t rows = 0;

  explicit Matrix(const Case& c) {
    for (auto count : c.blocks) {
      sources.emplace_back(random_values(count * c.in_features, 7 + static_cast<uint32_t>(rows)),
                           c.source);
      rows += count;
    }
    for (size_t i = 0; i < sources.size(); ++i) {
      blocks.push_back({sources[i].memory.as<>(), c.source, c.blocks[i]});
      values.insert(values.end(), sources[i].values.begin(), sources[i].values.end());
    }
    round_through(values, c.dtype);
    if (c.bias) bias = random_values(rows, 3);
  }
  const float* bias_data() const { return bias.empty() ? nullptr : bias.data(); }
};

// Checks y against the sum in double. Summing K products in fp32 in any order errs by at most
// (K + 1) ulp of the sum of magnitudes.
void expect_product(const Matrix& matrix, int64_t depth, const std::vector<float>& x,
                    int64_t x_stride, const std::vector<float>& y, int64_t y_stride, int64_t rows) {
  const double ulp = std::numeric_limits<float>::epsilon();
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < matrix.rows; ++n) {
      double sum = matrix.bias.empty() ? 0 : matrix.bias[static_cast<size_t>(n)];
      double magnitude = std::abs(sum);
      for (int64_t k = 0; k < depth; ++k) {
        const double product = static_cast<double>(x[static_cast<size_t>(m * x_stride + k)]) *
                               matrix.values[static_cast<size_t>(n * depth + k)];
        sum += product;
        magnitude += std::abs(product);
      }
      ASSERT_NEAR(y[static_cast<size_t>(m * y_stride + n)], sum,
                  (static_cast<double>(depth) + 1) * ulp * magnitude)
          << "row " << m << " of " << rows << ", output " << n;
    }
}

class LinearCases : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(
    Shapes, LinearCases,
    testing::Values(Case{{1}, 1, DType::kBFloat16, DType::kBFloat16, false},
                    Case{{1}, 1, DType::kFloat32, DType::kFloat32, true},
                    Case{{1}, 192, DType::kBFloat16, DType::kBFloat16, true},
                    Case{{300}, 1, DType::kFloat16, DType::kBFloat16, true},
                    Case{{300}, 1, DType::kFloat16, DType::kFloat32, false},
                    Case{{1286}, 192, DType::kBFloat16, DType::kBFloat16, false},
                    Case{{1286}, 192, DType::kBFloat16, DType::kFloat32, true},
                    Case{{200, 64, 7, 1}, 131, DType::kFloat32, DType::kBFloat16, true},
                    Case{{200, 64, 7, 1}, 131, DType::kFloat32, DType::kFloat32, true},
                    Case{{63, 2}, 514, DType::kFloat16, DType::kBFloat16, false},
                    Case{{64, 0, 512}, 96, DType::kBFloat16, DType::kBFloat16, true},
                    Case{{520}, 1027, DType::kBFloat16, DType::kBFloat16, false}));

// Rows from 1 to 70 on small matrices, a few on all; strided x and y, the gaps untouched.
TEST_P(LinearCases, EqualsTheSumsInDouble) {
  const Case& c = GetParam();
  const Matrix matrix(c);
  const bool small = matrix.rows * c.in_features < 40000;
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    const Linear linear(matrix.blocks, c.in_features, c.dtype, pool, matrix.bias_data());
    ASSERT_EQ(linear.in_features(), c.in_features);
    ASSERT_EQ(linear.out_features(), matrix.rows);
    for (int64_t rows = 1; rows <= 257; rows = rows == 70 ? 257 : rows + (small ? 1 : 23)) {
      const int64_t gap = rows % 3;
      const int64_t x_stride = c.in_features + gap, y_stride = matrix.rows + 2 * gap;
      const Typed x(random_values(rows * x_stride, static_cast<uint32_t>(rows)), c.dtype);
      std::vector<float> y(static_cast<size_t>(rows * y_stride), kNan);
      linear.apply(x.memory.as<>(), x_stride, rows, y.data(), y_stride, pool);
      expect_product(matrix, c.in_features, x.values, x_stride, y, y_stride, rows);
      for (int64_t m = 0; m < rows; ++m)
        for (int64_t n = matrix.rows; n < y_stride; ++n)
          ASSERT_TRUE(std::isnan(y[static_cast<size_t>(m * y_stride + n)])) << "wrote a gap";
    }
  }
}

// The backend without a library serves machines that oneDNN does not, whatever this build has.
TEST_P(LinearCases, PlainLoopsEqualTheSumsInDouble) {
  const Case& c = GetParam();
  const Matrix matrix(c);
  ThreadPool pool(1);
  const auto slice =
      make_plain_slice({matrix.blocks, c.in_features, c.dtype, matrix.bias_data(), 0, matrix.rows});
  for (const int64_t rows : {1, 2, 3, 4, 5, 9, 70}) {
    const Typed x(random_values(rows * c.in_features, static_cast<uint32_t>(rows)), c.dtype);
    std::vector<float> y(static_cast<size_t>(rows * matrix.rows), kNan);
    slice->apply({x.memory.as<>(), c.in_features, rows, y.data(), matrix.rows}, pool, 0);
    expect_product(matrix, c.in_features, x.values, c.in_features, y, matrix.rows, rows);
  }
}

TEST_P(LinearCases, RepeatsBitForBit) {
  const Case& c = GetParam();
  const Matrix matrix(c);
  ThreadPool pool(2);
  const Linear linear(matrix.blocks, c.in_features, c.dtype, pool, matrix.bias_data());
  for (const int64_t rows : {1, 13, 64, 100}) {
    const Typed x(random_values(rows * c.in_features, 5), c.dtype);
    std::vector<float> first(static_cast<size_t>(rows * matrix.rows)), again = first;
    linear.apply(x.memory.as<>(), c.in_features, rows, first.data(), matrix.rows, pool);
    linear.apply(x.memory.as<>(), c.in_features, rows, again.data(), matrix.rows, pool);
    EXPECT_EQ(first, again) << rows;
  }
}

TEST(Linear, TakesSourcesAtOddAddresses) {
  ThreadPool pool(1);
  const std::vector<float> values = random_values(8 * 5, 1);
  std::vector<std::byte> bytes(values.size() * 4 + 1);
  std::memcpy(bytes.data() + 1, values.data(), values.size() * 4);
  const Linear linear({{bytes.data() + 1, DType::kFloat32, 8}}, 5, DType::kFloat32, pool);
  const std::vector<float> x = {1, 0, 0, 0, 0};
  std::vector<float> y(8);
  linear.apply(x.data(), 5, 1, y.data(), 8, pool);
  for (size_t n = 0; n < 8; ++n) EXPECT_EQ(y[n], values[n * 5]);
}

TEST(Linear, HoldsTheWeightsOnce) {
  ThreadPool pool(2);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Matrix matrix({{1286}, 192, DType::kBFloat16, dtype, false});
    const Linear linear(matrix.blocks, 192, dtype, pool);
    const int64_t bytes = 1286 * 192 * dtype_bytes(dtype);
    EXPECT_GE(linear.weight_bytes(), bytes);
    // Packed in blocks of 64 outputs.
    EXPECT_LE(linear.weight_bytes(), bytes + 2 * 64 * 192 * dtype_bytes(dtype));
  }
}

TEST(Linear, NoRowsAndNoWeightsAreLegal) {
  ThreadPool pool(2);
  const Matrix matrix({{65}, 33, DType::kFloat32, DType::kFloat32, false});
  const Linear linear(matrix.blocks, 33, DType::kFloat32, pool);
  linear.apply(nullptr, 33, 0, nullptr, 65, pool);
  const Linear none({{nullptr, DType::kFloat32, 0}}, 33, DType::kFloat32, pool);
  EXPECT_EQ(none.out_features(), 0);
  EXPECT_EQ(none.weight_bytes(), 0);
  const std::vector<float> x(33);
  none.apply(x.data(), 33, 1, nullptr, 0, pool);
}

TEST(Linear, AnotherThreadMayCall) {
  ThreadPool pool(2);
  const Matrix matrix({{300}, 64, DType::kBFloat16, DType::kBFloat16, false});
  const Linear linear(matrix.blocks, 64, DType::kBFloat16, pool);
  const Typed x(random_values(3 * 64, 5), DType::kBFloat16);
  std::vector<float> y(3 * 300), again = y;
  linear.apply(x.memory.as<>(), 64, 3, y.data(), 300, pool);
  std::thread([&] { linear.apply(x.memory.as<>(), 64, 3, again.data(), 300, pool); }).join();
  EXPECT_EQ(y, again);
}

TEST(Linear, RefusesMisuse) {
  ThreadPool pool(2), other(1);
  const Matrix matrix({{64}, 32, DType::kFloat32, DType::kFloat32, false});
  Linear linear(matrix.blocks, 32, DType::kFloat32, pool);
  std::vector<float> x(64), y(128);
  EXPECT_THROW(linear.apply(x.data(), 32, 1, y.data(), 64, other), Error);
  EXPECT_THROW(linear.apply(x.data(), 31, 2, y.data(), 64, pool), Error);
  EXPECT_THROW(linear.apply(x.data(), 32, 2, y.data(), 63, pool), Error);
  EXPECT_THROW(Linear(matrix.blocks, 32, DType::kFloat16, pool), Error);
  EXPECT_THROW(Linear().apply(x.data(), 32, 1, y.data(), 64, pool), Error);
}

}  // namespace
}  // namespace replayssm::cpu
