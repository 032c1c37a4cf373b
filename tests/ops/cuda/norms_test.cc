// Gated norms on the device against their definition.
#include "ops/cuda/norms.h"

#include "ops/cuda/device_rows.h"
#include "replayssm/error.h"

namespace replayssm::testing {
namespace {

constexpr int64_t kGroups = 3;

struct GatedCase {
  bool weight, weight_per_group, gate_first, sigmoid;
};

struct Types {
  DType x, gate, y;
};

// The sum of squares errs by at most (dim + 1) roundings, its root by half of that; the mean, the
// root and the products by one or two each. An activation errs by a few units; it enters the value
// and, gated first, the sum of squares.
double norm_units(int64_t dim) { return static_cast<double>(dim) / 2 + 32; }

void check(const GatedCase& c, const Types& types, int64_t dim, int64_t rows, int64_t gap) {
  SCOPED_TRACE(::testing::Message() << dim << " " << dtype_name(types.x) << " " << gap);
  const int64_t width = kGroups * dim, stride = width + gap;
  const Rows x(rows, width, width, types.x, 5, 2), gate(rows, width, stride, types.gate, 6, 3);
  const auto weight = random_values(c.weight_per_group ? dim : width, 7);
  const DeviceArray<float> device_weight(weight);
  const auto bytes = same_in_every_run([&](bool graph) {
    const DeviceArray<uint8_t> y(std::vector<uint8_t>(rows * width * dtype_bytes(types.y), 0xff));
    cuda::GatedNormParams p;
    p.x = x.data.data();
    p.gate = gate.data.data();
    p.gate_stride = stride;
    p.weight = c.weight ? device_weight.data() : nullptr;
    p.rows = rows;
    p.groups = kGroups;
    p.group_dim = dim;
    p.weight_per_group = c.weight_per_group;
    p.gate_first = c.gate_first;
    p.activation = c.sigmoid ? GateActivation::kSigmoid : GateActivation::kSilu;
    p.eps = 1e-5f;
    p.y = y.data();
    p.x_dtype = types.x;
    p.gate_dtype = types.gate;
    p.y_dtype = types.y;
    run_call([&](cudaStream_t stream) { cuda::gated_rms_norm(p, stream); }, graph);
    std::vector<uint8_t> bytes;
    y.download(bytes);
    return bytes;
  });
  std::vector<float> y(rows * width);
  dispatch_float(types.y, [&]<class T>() {
    for (size_t i = 0; i < y.size(); ++i)
      y[i] = to_float(reinterpret_cast<const T*>(bytes.data())[i]);
  });
  const reference::GatedNorm shape{rows,         kGroups,   dim,          c.weight_per_group,
                                   c.gate_first, c.sigmoid, double{1e-5f}};
  expect_close(y,
               reference::gated_rms_norm(shape, to_double(x.values), to_double(gate.values),
                                         c.weight ? to_double(weight) : reference::Values()),
               norm_units(dim), types.y);
}

const GatedCase kCases[] = {{true, false, true, false},  // Mamba-2
                            {true, true, false, false},  // Gated DeltaNet
                            {true, true, false, true},   // Kimi Delta
                            {true, false, false, false}, {true, true, true, true},
                            {false, false, true, false}, {false, false, false, true}};
constexpr DType kSingle = DType::kFloat32, kBf = DType::kBFloat16, kHalf = DType::kFloat16;

TEST(CudaNorms, EverySizeMatchesTheDefinition) {
  REQUIRE_DEVICE();
  for (const auto& c : kCases)
    for (const int64_t dim :
         {1, 7, 8, 33, 50, 64, 80, 96, 128, 192, 256, 300, 512, 1024, 1027, 8192})
      check(c, {kSingle, kSingle, kSingle}, dim, 5, dim % 2 ? 3 : 8);
}

TEST(CudaNorms, EveryTypeMatchesTheDefinition) {
  REQUIRE_DEVICE();
  for (const int64_t dim : {7, 128, 1024}) {
    for (const DType x : {kSingle, kBf, kHalf})
      for (const DType gate : {kSingle, kBf, kHalf})
        for (const DType y : {kSingle, kBf, kHalf}) {
          check(kCases[0], {x, gate, y}, dim, 4, 8);
          check(kCases[1], {x, gate, y}, dim, 4, 5);  // rows of no alignment
        }
  }
}

// A group's bits depend on nothing but the group.
TEST(CudaNorms, RowsOfABatchGiveTheirBitsAlone) {
  REQUIRE_DEVICE();
  for (const int64_t dim : {16, 128, 300, 512, 1000, 4096}) {
    const int64_t rows = 37;
    const Rows x(rows, dim, dim, kBf, 1, 1), gate(rows, dim, dim, kBf, 2, 1);
    const DeviceArray<float> weight(random_values(dim, 3));
    const DeviceArray<float> y(std::vector<float>(rows * dim, 0)), one(random_values(dim, 4));
    cuda::GatedNormParams p{.x = x.data.data(),
                            .gate = gate.data.data(),
                            .gate_stride = dim,
                            .weight = weight.data(),
                            .rows = rows,
                            .groups = 1,
                            .group_dim = dim,
                            .eps = 1e-5f,
                            .y = y.data(),
                            .x_dtype = kBf,
                            .gate_dtype = kBf};
    run_call([&](cudaStream_t stream) { cuda::gated_rms_norm(p, stream); });
    std::vector<float> all, single;
    y.download(all);
    p.rows = 1;
    p.y = one.data();
    for (int64_t r = 0; r < rows; ++r) {
      p.x = x.data.data() + r * dim * 2;
      p.gate = gate.data.data() + r * dim * 2;
      run_call([&](cudaStream_t stream) { cuda::gated_rms_norm(p, stream); });
      one.download(single);
      EXPECT_TRUE(same_bits(single, {all.begin() + r * dim, all.begin() + (r + 1) * dim})) << r;
    }
  }
}

// Rows of padding are zeros and may have any gate; rows outside the bounds are not even that.
TEST(CudaNorms, ZerosStayAndRowsOutsideTheBoundsAreNotTouched) {
  REQUIRE_DEVICE();
  constexpr int64_t kRows = 5, kDim = 64;
  std::vector<float> x = random_values(kRows * kDim, 1), gate = random_values(kRows * kDim, 2);
  std::fill_n(x.begin() + 2 * kDim, kDim, 0.0f);
  for (const int64_t row : {0, 2, 4}) std::fill_n(gate.begin() + row * kDim, kDim, kNan);
  const DeviceArray<float> values(x), gates(gate), weight(random_values(kDim, 3));
  const DeviceArray<int32_t> bounds(std::vector<int32_t>{1, 4});
  for (const bool gate_first : {false, true}) {
    const DeviceArray<float> y(std::vector<float>(kRows * kDim, 7));
    const cuda::GatedNormParams p{.x = values.data(),
                                  .gate = gates.data(),
                                  .gate_stride = kDim,
                                  .weight = weight.data(),
                                  .rows = kRows,
                                  .groups = 1,
                                  .group_dim = kDim,
                                  .gate_first = gate_first,
                                  .eps = 1e-5f,
                                  .first_row = bounds.data(),
                                  .end_row = bounds.data() + 1,
                                  .y = y.data()};
    run_call([&](cudaStream_t stream) { cuda::gated_rms_norm(p, stream); });
    std::vector<float> got;
    y.download(got);
    for (int64_t i = 0; i < kRows * kDim; ++i) {
      const int64_t row = i / kDim;
      if (row == 0 || row == 4) {
        EXPECT_EQ(got[i], 7);
      } else if (row == 2) {
        EXPECT_EQ(got[i], 0);
      } else {
        EXPECT_TRUE(std::isfinite(got[i]) && got[i] != 7);
      }
    }
  }
}

TEST(CudaNorms, WrongArgumentsAreNamed) {
  alignas(16) float data[16];
  const cuda::GatedNormParams right{.x = data,
                                    .gate = data,
                                    .gate_stride = 8,
                                    .weight = data,
                                    .rows = 2,
                                    .groups = 2,
                                    .group_dim = 4,
                                    .y = data};
  const auto message = [&](auto&& change) {
    auto p = right;
    change(p);
    try {
      cuda::gated_rms_norm(p, nullptr);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using P = cuda::GatedNormParams;
  EXPECT_EQ(message([](P& p) { p.gate_stride = 7; }), "gate_stride: expected at least 8, got 7");
  EXPECT_EQ(message([](P& p) { p.group_dim = 8193; }), "group_dim: expected 1 to 8192, got 8193");
  EXPECT_EQ(message([](P& p) { p.groups = 0; }), "groups: expected at least 1, got 0");
  EXPECT_EQ(message([](P& p) { p.y_dtype = DType::kFloat8E4M3; }),
            "y_dtype: expected float32, float16 or bfloat16, got float8_e4m3fn");
  EXPECT_EQ(message([](P& p) { p.x = nullptr; }), "x: expected memory, got a null pointer");
  EXPECT_EQ(message([](P& p) { p.rows = 0, p.y = nullptr; }), "");
}

}  // namespace
}  // namespace replayssm::testing
