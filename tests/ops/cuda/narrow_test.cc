#include "ops/cuda/narrow.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/cuda/device.h"
#include "ops/cuda/device_memory.h"
#include "ops/cuda/linear_values.h"

namespace replayssm::testing {
namespace {

using cuda::LinearActivation;

struct Case {
  int64_t rows, in, out, most_parts = 1;
  LinearActivation activation = LinearActivation::kNone;
};

// What a case multiplies. Behind the rows of x and y is what nobody may read or write.
struct Problem {
  static constexpr int64_t kGap = 8;
  static constexpr float kScale = 0.75f;

  explicit Problem(const Case& c)
      : c(c),
        x(DType::kBFloat16, c.rows * c.in, 1),
        weight(DType::kBFloat16, c.out * c.in, 2),
        bias(DType::kFloat32, c.out, 3),
        x_there(with_gaps()),
        weight_there(weight.bytes),
        bias_there(bias.bytes) {
    forget_results();
  }

  // Results become NaN.
  void forget_results() {
    y_there = std::vector<float>(c.rows * (c.out + kGap) * c.most_parts, std::nanf(""));
    activated_there = std::vector<uint16_t>(c.rows * c.out, 0x7fff);
  }
  void run(const cuda::NarrowTile& tile) {
    forget_results();
    const cuda::Stream stream;
    cuda::narrow_product(params(), tile, stream.get());
    stream.synchronize();
  }

  std::vector<uint16_t> with_gaps() const {
    std::vector<uint16_t> rows(c.rows * (c.in + kGap), 0x7fff);  // NaN
    const auto* from = reinterpret_cast<const uint16_t*>(x.bytes.data());
    for (int64_t r = 0; r < c.rows; ++r)
      std::copy_n(from + r * c.in, c.in, rows.data() + r * (c.in + kGap));
    return rows;
  }
  cuda::LinearParams params() {
    return {.x = x_there.data(),
            .x_head_stride = c.in + kGap,
            .weight = weight_there.data(),
            .bias = reinterpret_cast<const float*>(bias_there.data()),
            .in_features = c.in,
            .out_features = c.out,
            .rows = c.rows,
            .y = y_there.data(),
            .y_head_stride = c.out + kGap,
            .most_parts = c.most_parts,
            .activation = c.activation,
            .scale = kScale,
            .activated = activated_there.data()};
  }
  std::vector<double> sums(int64_t row) const {
    std::vector<double> sums(bias.exact);
    for (int64_t n = 0; n < c.out; ++n)
      for (int64_t k = 0; k < c.in; ++k)
        sums[n] += x.exact[row * c.in + k] * weight.exact[n * c.in + k];
    return sums;
  }

  const Case& c;
  const Values x, weight, bias;
  const DeviceArray<uint16_t> x_there;
  const DeviceArray<std::byte> weight_there, bias_there;
  DeviceArray<float> y_there;
  DeviceArray<uint16_t> activated_there;
};

void expect_product(Problem& problem, const cuda::NarrowTile& tile) {
  const Case& c = problem.c;
  problem.run(tile);
  std::vector<float> y;
  problem.y_there.download(y);
  const int64_t stride = c.out + Problem::kGap;
  for (int64_t r = 0; r < c.rows; ++r) {
    const auto want = problem.sums(r);
    for (int64_t n = 0; n < stride; ++n) {
      double got = 0;
      for (int64_t part = 0; part < tile.parts; ++part) got += y[(part * c.rows + r) * stride + n];
      if (n >= c.out) {
        ASSERT_TRUE(std::isnan(got)) << "behind row " << r;
      } else {
        ASSERT_NEAR(got, want[n], tolerance(c.in)) << "row " << r << " output " << n;
      }
    }
  }
}

void expect_activated(Problem& problem, const cuda::NarrowTile& tile) {
  const Case& c = problem.c;
  problem.run(tile);
  std::vector<uint16_t> y;
  problem.activated_there.download(y);
  const int64_t width = c.activation == LinearActivation::kSwiGlu ? c.out / 2 : c.out;
  for (int64_t r = 0; r < c.rows; ++r) {
    const auto sums = problem.sums(r);
    for (int64_t n = 0; n < width; ++n) {
      const float got = to_float(std::bit_cast<bf16>(y[r * width + n]));
      const double want = activated(c.activation, Problem::kScale, sums, n);
      ASSERT_NEAR(got, want, std::abs(want) / 250 + 1e-3) << "row " << r << " output " << n;
    }
  }
  for (size_t i = c.rows * width; i < y.size(); ++i) ASSERT_EQ(y[i], 0x7fff) << "behind the rows";
}

// Every cut, with one part and with as many as there may be.
void for_cuts(const Case& c, auto&& check) {
  Problem problem(c);
  const auto tiles = cuda::narrow_tiles(problem.params());
  ASSERT_EQ(tiles.size(), 3u);
  for (cuda::NarrowTile tile : tiles) {
    for (int parts = 1; parts <= tile.parts; ++parts) {
      tile.parts = parts;
      SCOPED_TRACE(::testing::Message() << "rows=" << c.rows << " in=" << c.in << " out=" << c.out
                                        << " tile " << tile.weight_rows << " parts " << parts);
      check(problem, tile);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(CudaNarrow, IsTheSumOfProducts) {
  REQUIRE_DEVICE();
  for (const int64_t rows : {33, 64, 65, 100, 128}) {
    for_cuts({rows, 72, 104}, expect_product);
    for_cuts({rows, 1544, 8, 12}, expect_product);
    for_cuts({rows, 832, 296, 3}, expect_product);
  }
}

TEST(CudaNarrow, BlocksTakeSeveralTiles) {
  REQUIRE_DEVICE();
  for_cuts({70, 200, 96 * 300 + 8}, expect_product);
  for_cuts({40, 40, 96 * 300 + 8}, expect_product);
}

TEST(CudaNarrow, AppliesActivations) {
  REQUIRE_DEVICE();
  for (const auto activation : {LinearActivation::kSwiGlu, LinearActivation::kReluSquared}) {
    for (const int64_t rows : {33, 128}) {
      for (const int64_t out : {16, 208, 4240})
        for_cuts({rows, 136, out, 1, activation}, expect_activated);
    }
  }
}

TEST(CudaNarrow, RepeatsItsBits) {
  REQUIRE_DEVICE();
  const Case c{128, 2560, 2560, 12};
  Problem problem(c);
  for (const cuda::NarrowTile& tile : cuda::narrow_tiles(problem.params())) {
    const cuda::Stream stream;
    std::vector<float> first, again;
    for (int i = 0; i < 5; ++i) {
      for (int j = 0; j < 3; ++j) cuda::narrow_product(problem.params(), tile, stream.get());
      stream.synchronize();
      problem.y_there.download(i == 0 ? first : again);
      if (i == 0) continue;
      ASSERT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(float)), 0)
          << "tile " << tile.weight_rows;
    }
  }
}

TEST(CudaNarrow, TakesAlignedBfloat16AndNoMoreThanItsRows) {
  REQUIRE_DEVICE();
  const Case c{64, 64, 64};
  Problem problem(c);
  const auto refused = [&](auto change) {
    cuda::LinearParams changed = problem.params();
    change(changed);
    return cuda::narrow_tiles(changed).empty();
  };
  EXPECT_FALSE(refused([](auto&) {}));
  EXPECT_TRUE(refused([](auto& q) { q.rows = 32; }));
  EXPECT_TRUE(refused([](auto& q) { q.rows = 129; }));
  EXPECT_TRUE(refused([](auto& q) { q.heads = 2; }));
  EXPECT_TRUE(refused([](auto& q) { q.dtype = DType::kFloat16; }));
  EXPECT_TRUE(refused([](auto& q) { q.out_features = 60; }));
  EXPECT_TRUE(refused([](auto& q) { q.in_features = 60; }));
  EXPECT_TRUE(refused([](auto& q) { q.x_head_stride = 68; }));
  EXPECT_TRUE(refused([](auto& q) { q.y_head_stride = 66; }));
}

}  // namespace
}  // namespace replayssm::testing
