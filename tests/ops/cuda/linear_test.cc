#include "ops/cuda/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "ops/cuda/device.h"
#include "ops/cuda/device_memory.h"
#include "ops/cuda/linear_values.h"
#include "ops/cuda/skinny.h"

namespace replayssm::testing {
namespace {

struct Case {
  DType dtype;
  int64_t rows, in, out, heads, x_gap, y_gap;
  bool bias;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const int64_t rows : {1, 2, 4, 7, 8, 33}) {
      all.push_back({dtype, rows, 64, 40, 1, 0, 0, false});
      all.push_back({dtype, rows, 2568, 37, 1, 0, 0, true});
      all.push_back({dtype, rows, 192, 5, 1, 8, 3, true});
      all.push_back({dtype, rows, 32, 48, 3, 16, 8, false});
      all.push_back({dtype, rows, 1032, 4243, 1, 0, 0, false});
    }
  }
  return all;
}

void expect_products(const Case& c, bool skinny) {
  const int64_t x_stride = c.in + c.x_gap, y_stride = c.out + c.y_gap;
  const Values x(c.dtype, c.rows * c.heads * x_stride, 1);
  const Values weight(c.dtype, c.heads * c.out * c.in, 2);
  const Values bias(DType::kFloat32, c.out, 3);
  const DeviceArray<std::byte> x_there(x.bytes), weight_there(weight.bytes), bias_there(bias.bytes);
  const std::vector<float> untouched(c.rows * c.heads * y_stride, std::nanf(""));
  DeviceArray<float> y_there(untouched);
  const cuda::LinearParams params{
      .x = x_there.data(),
      .x_head_stride = x_stride,
      .weight = weight_there.data(),
      .bias = c.bias ? reinterpret_cast<const float*>(bias_there.data()) : nullptr,
      .in_features = c.in,
      .out_features = c.out,
      .heads = c.heads,
      .rows = c.rows,
      .dtype = c.dtype,
      .y = y_there.data(),
      .y_head_stride = y_stride};
  const cuda::Stream stream;
  cuda::DeviceMemory memory(stream);
  if (skinny) {
    cuda::skinny_product(params, stream.get());
  } else {
    cuda::LinearRunner runner(memory);
    runner.run(params, stream.get());
    runner.tune(true);
    runner.run(params, stream.get());
  }
  stream.synchronize();
  std::vector<float> y;
  y_there.download(y);
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t n = 0; n < y_stride; ++n) {
        const float got = y[(r * c.heads + h) * y_stride + n];
        if (n >= c.out) {
          ASSERT_TRUE(std::isnan(got)) << "behind row " << r << " head " << h;
          continue;
        }
        double want = c.bias ? bias.exact[n] : 0;
        for (int64_t k = 0; k < c.in; ++k)
          want +=
              x.exact[(r * c.heads + h) * x_stride + k] * weight.exact[(h * c.out + n) * c.in + k];
        ASSERT_NEAR(got, want, tolerance(c.in))
            << dtype_name(c.dtype) << " rows=" << c.rows << " in=" << c.in << " row " << r
            << " head " << h << " output " << n;
      }
    }
  }
}

TEST(CudaLinear, IsTheSumOfProducts) {
  REQUIRE_DEVICE();
  for (const Case& c : cases()) expect_products(c, false);
}

TEST(CudaLinear, KernelForFewRowsIsTheSumOfProducts) {
  REQUIRE_DEVICE();
  int64_t compared = 0;
  for (const Case& c : cases()) {
    if (c.heads != 1 || c.rows > cuda::kMostSkinnyRows || c.dtype == DType::kFloat32) continue;
    expect_products(c, true);
    ++compared;
  }
  EXPECT_GT(compared, 12);
}

TEST(CudaLinear, KernelForFewRowsAppliesActivations) {
  REQUIRE_DEVICE();
  constexpr float kScale = 0.75f;
  constexpr int64_t kIn = 136;
  for (const auto activation :
       {cuda::LinearActivation::kSwiGlu, cuda::LinearActivation::kReluSquared}) {
    for (const int64_t rows : {1, 3, 8}) {
      for (const int64_t out : {2, 38, 4246}) {
        const Values x(DType::kBFloat16, rows * kIn, 4), weight(DType::kBFloat16, out * kIn, 5);
        const Values bias(DType::kFloat32, out, 6);
        const DeviceArray<std::byte> x_there(x.bytes), weight_there(weight.bytes),
            bias_there(bias.bytes);
        const int64_t width = activation == cuda::LinearActivation::kSwiGlu ? out / 2 : out;
        DeviceArray<bf16> y_there(std::vector<bf16>(rows * width, from_float<bf16>(-77)));
        const cuda::Stream stream;
        cuda::skinny_product({.x = x_there.data(),
                              .x_head_stride = kIn,
                              .weight = weight_there.data(),
                              .bias = reinterpret_cast<const float*>(bias_there.data()),
                              .in_features = kIn,
                              .out_features = out,
                              .rows = rows,
                              .activation = activation,
                              .scale = kScale,
                              .activated = y_there.data()},
                             stream.get());
        stream.synchronize();
        std::vector<bf16> y;
        y_there.download(y);
        for (int64_t r = 0; r < rows; ++r) {
          std::vector<double> sums(bias.exact);
          for (int64_t n = 0; n < out; ++n) {
            for (int64_t k = 0; k < kIn; ++k)
              sums[n] += x.exact[r * kIn + k] * weight.exact[n * kIn + k];
          }
          for (int64_t n = 0; n < width; ++n) {
            const double want = activated(activation, kScale, sums, n);
            ASSERT_NEAR(to_float(y[r * width + n]), want, std::abs(want) / 250 + 1e-3)
                << "rows=" << rows << " out=" << out << " row " << r << " output " << n;
          }
        }
      }
    }
  }
}

// A product that ends in the residual stream, and one behind it that takes the rest of the norm.
TEST(CudaLinear, OneRowTakesTheNormAlong) {
  REQUIRE_DEVICE();
  constexpr int64_t kIn = 200, kOut = 24;
  constexpr float kScale = 0.5f, kEps = 1e-3f;
  for (const int64_t dim : {264, 7000}) {
    const Values x(DType::kBFloat16, kIn, 1), first(DType::kBFloat16, dim * kIn, 2);
    const Values second(DType::kBFloat16, kOut * dim, 3);
    const Values bias(DType::kFloat32, dim, 4), hidden(DType::kFloat32, dim, 5);
    const Values weight(DType::kFloat32, dim, 6);
    const DeviceArray<std::byte> x_there(x.bytes), first_there(first.bytes),
        second_there(second.bytes), bias_there(bias.bytes), weight_there(weight.bytes);
    DeviceArray<std::byte> hidden_there(hidden.bytes);
    DeviceArray<bf16> normed_there(std::vector<bf16>(dim, from_float<bf16>(std::nanf(""))));
    const int64_t parts = cuda::residual_parts(dim);
    DeviceArray<float> squares(std::vector<float>(parts, std::nanf("")));
    DeviceArray<float> y_there(std::vector<float>(kOut, std::nanf("")));
    const cuda::Stream stream;
    cuda::DeviceMemory memory(stream);
    cuda::LinearRunner runner(memory);
    const auto* floats = reinterpret_cast<const float*>(bias_there.data());
    runner.run({.x = x_there.data(),
                .x_head_stride = kIn,
                .weight = first_there.data(),
                .bias = floats,
                .in_features = kIn,
                .out_features = dim,
                .rows = 1,
                .residual = {.hidden = reinterpret_cast<float*>(hidden_there.data()),
                             .scale = kScale,
                             .weight = reinterpret_cast<const float*>(weight_there.data()),
                             .normed = normed_there.data(),
                             .squares = squares.data()}},
               stream.get());
    runner.run({.x = normed_there.data(),
                .x_head_stride = dim,
                .weight = second_there.data(),
                .bias = floats,
                .in_features = dim,
                .out_features = kOut,
                .rows = 1,
                .y = y_there.data(),
                .y_head_stride = kOut,
                .norm = {.squares = squares.data(), .parts = parts, .dim = dim, .eps = kEps}},
               stream.get());
    stream.synchronize();
    std::vector<std::byte> bytes;
    std::vector<bf16> normed;
    std::vector<float> y;
    hidden_there.download(bytes);
    normed_there.download(normed);
    y_there.download(y);
    const auto* h = reinterpret_cast<const float*>(bytes.data());
    double squared = 0;
    for (int64_t n = 0; n < dim; ++n) {
      double want = bias.exact[n];
      for (int64_t k = 0; k < kIn; ++k) want += x.exact[k] * first.exact[n * kIn + k];
      want = hidden.exact[n] + kScale * want;
      ASSERT_NEAR(h[n], want, tolerance(kIn) + 1e-6) << "hidden " << n;
      const double scaled = want * weight.exact[n];
      ASSERT_NEAR(to_float(normed[n]), scaled, std::abs(scaled) / 250 + 1e-5) << "normed " << n;
      squared += want * want;
    }
    const double norm = std::sqrt(squared / static_cast<double>(dim) + kEps);
    for (int64_t n = 0; n < kOut; ++n) {
      double want = 0;
      for (int64_t k = 0; k < dim; ++k) want += to_float(normed[k]) * second.exact[n * dim + k];
      ASSERT_NEAR(y[n], want / norm + bias.exact[n], tolerance(dim)) << "output " << n;
    }
  }
}

TEST(CudaLinear, FewRowsAreOfSixteenBitsAndAligned) {
  alignas(16) static const char memory[64] = {};
  cuda::LinearParams p{.x = memory, .x_head_stride = 8, .weight = memory, .in_features = 8};
  p.out_features = 3;
  p.rows = 4;
  EXPECT_TRUE(cuda::is_skinny(p));
  const auto refused = [&](auto change) {
    cuda::LinearParams changed = p;
    change(changed);
    return !cuda::is_skinny(changed);
  };
  EXPECT_TRUE(refused([](auto& q) { q.rows = 9; }));
  EXPECT_TRUE(refused([](auto& q) { q.heads = 2; }));
  EXPECT_TRUE(refused([](auto& q) { q.dtype = DType::kFloat32; }));
  EXPECT_TRUE(refused([](auto& q) { q.x = memory + 2; }));
  EXPECT_TRUE(refused([](auto& q) { q.x_head_stride = 9; }));
  EXPECT_TRUE(refused([](auto& q) { q.weight = memory + 8; }));
  EXPECT_TRUE(refused([](auto& q) { q.in_features = 12; }));
  EXPECT_TRUE(refused([](auto& q) { q.in_features = q.x_head_stride = 1 << 14; }));
}

}  // namespace
}  // namespace replayssm::testing
