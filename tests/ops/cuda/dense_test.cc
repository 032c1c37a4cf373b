// Element-wise ops and the residual stream on the device against their definitions.
#include "ops/cuda/dense.h"

#include "ops/cuda/device_rows.h"

namespace replayssm::testing {
namespace {

constexpr int64_t kRowCount = 9;

// Every op of a row of `dim`, in every pair of types; strides that are multiples of 16 bytes and
// others.
void for_shapes(const std::function<void(int64_t dim, int64_t gap, DType in, DType out)>& check) {
  for (const int64_t dim : {1, 7, 8, 64, 80, 1027, 2560})
    for (const int64_t gap : {0, 3, 8})
      for (const DType in : kDtypes)
        for (const DType out : kDtypes) {
          SCOPED_TRACE(::testing::Message()
                       << dim << "+" << gap << " " << dtype_name(in) << " to " << dtype_name(out));
          check(dim, gap, in, out);
          if (::testing::Test::HasFatalFailure()) return;
        }
}

TEST(CudaDense, EmbedTakesRowsAndZeroesPadding) {
  REQUIRE_DEVICE();
  for_shapes([](int64_t dim, int64_t gap, DType in, DType out) {
    const Rows table(20, dim, dim + gap, in, 1, 1);
    const std::vector<int32_t> ids = {3, 0, 19, -1, 3, 7, -5, 11, 1};
    const std::vector<int32_t> named = {3, 0, -4, -1, -2, 7, -3, 11, 1}, drawn = {3, -5, 19};
    const DeviceArray<int32_t> device_ids(dim % 2 == 0 ? ids : named), device_drawn(drawn);
    const auto got = run_rows(kRowCount, dim, dim + gap, out, [&](auto& y, cudaStream_t stream) {
      cuda::embed(table, device_ids.data(), dim % 2 == 0 ? nullptr : device_drawn.data(), kRowCount,
                  dim, 1.5f, y, stream);
    });
    reference::Values want;
    for (const int32_t id : ids)
      for (int64_t i = 0; i < dim; ++i)
        want.push_back(id < 0 ? 0 : 1.5 * table.values[id * dim + i]);
    expect_close(got, want, 1, out);
  });
}

TEST(CudaDense, SwiGluMatchesTheDefinition) {
  REQUIRE_DEVICE();
  for_shapes([](int64_t dim, int64_t gap, DType in, DType out) {
    const Rows x(kRowCount, 2 * dim, 2 * dim + gap, in, 2, 4);
    const auto got = run_rows(kRowCount, dim, dim + gap, out, [&](auto& y, cudaStream_t stream) {
      cuda::swiglu(x, 0.5f, kRowCount, dim, y, stream);
    });
    auto scaled = to_double(x.values);
    for (size_t i = 0; i < scaled.size(); ++i)
      if (static_cast<int64_t>(i) % (2 * dim) < dim) scaled[i] *= 0.5;
    // An exponential, a quotient and two products.
    expect_close(got, reference::swiglu(scaled, kRowCount, dim), 32, out);
  });
}

TEST(CudaDense, ReluSquaredMatchesTheDefinition) {
  REQUIRE_DEVICE();
  for_shapes([](int64_t dim, int64_t gap, DType in, DType out) {
    const Rows x(kRowCount, dim, dim + gap, in, 3, 4);
    const auto got = run_rows(kRowCount, dim, dim + gap, out, [&](auto& y, cudaStream_t stream) {
      cuda::relu_squared(x, 2, kRowCount, dim, y, stream);
    });
    auto scaled = to_double(x.values);
    for (double& value : scaled) value *= 2;
    expect_close(got, reference::relu_squared(scaled), 2, out);
  });
}

TEST(CudaDense, SigmoidGateMatchesTheDefinition) {
  REQUIRE_DEVICE();
  for_shapes([](int64_t dim, int64_t gap, DType in, DType out) {
    const Rows x(kRowCount, dim, dim + gap, in, 4, 1), gate(kRowCount, dim, dim + 8, out, 5, 5);
    const auto got = run_rows(kRowCount, dim, dim, out, [&](auto& y, cudaStream_t stream) {
      cuda::sigmoid_gate(x, gate, kRowCount, dim, y, stream);
    });
    expect_close(got, reference::sigmoid_gate(to_double(x.values), to_double(gate.values)), 32,
                 out);
  });
}

TEST(CudaDense, AddScaledAndScaleColumnsWorkInPlace) {
  REQUIRE_DEVICE();
  for_shapes([](int64_t dim, int64_t gap, DType in, DType out) {
    const Rows x(kRowCount, dim, dim + gap, in, 6, 1), start(kRowCount, dim, dim + gap, out, 7, 1);
    const auto scale = random_values(dim, 8);
    const DeviceArray<float> device_scale(scale);
    const auto sum = run_rows_in_place(start, dim, [&](auto& y, cudaStream_t stream) {
      cuda::add_scaled(x, 0.3f, kRowCount, dim, y, stream);
    });
    const auto scaled = run_rows_in_place(start, dim, [&](auto& y, cudaStream_t stream) {
      cuda::scale_columns(y, device_scale.data(), kRowCount, dim, stream);
    });
    reference::Values product;
    for (size_t i = 0; i < sum.size(); ++i) {
      // One rounding to fp32, which may cancel, and one to the type.
      const double want = start.values[i] + double{0.3f} * x.values[i];
      ASSERT_NEAR(
          sum[i], want,
          std::abs(want) * (unit(out) + 0x1p-23) + (out == DType::kFloat16 ? 0x1p-25 : 0x1p-126));
      product.push_back(double{start.values[i]} * scale[i % dim]);
    }
    expect_close(scaled, product, 1, out);
  });
}

TEST(CudaDense, HeadsAreConvertedAndCopied) {
  REQUIRE_DEVICE();
  for_shapes([](int64_t dim, int64_t gap, DType in, DType out) {
    constexpr int64_t kHeads = 3;
    // Both sides have room behind every head.
    const int64_t from = dim + gap, to = dim + 8;
    const Rows x(kRowCount * kHeads, dim, from, in, 9, 1);
    const auto got = run_rows(kRowCount * kHeads, dim, to, out, [&](auto& y, cudaStream_t stream) {
      cuda::convert_heads({x.data.data(), kHeads * from, in}, from, kRowCount, kHeads, dim,
                          {y.data, kHeads * to, out}, to, stream);
    });
    expect_close(got, to_double(x.values), 0, out);
  });
}

// Norms of sums of so many parts and what they are added to, as in norms_test.cc.
void expect_norm(const std::vector<float>& got, const reference::Values& want, int64_t dim,
                 DType dtype, double parts) {
  for (size_t i = 0; i < want.size(); ++i)
    ASSERT_NEAR(got[i], want[i],
                std::abs(want[i]) * (unit(dtype) + (static_cast<double>(dim) / 2 + 32) * 0x1p-24) +
                    parts * 0x1p-18)
        << i;
}

struct NormCase {
  bool delta, second, weight, gathered, wide;
};

// The residual stream's sum is rounded twice, and again as it is stored; the norm as in
// norms_test.cc.
void check_norm(const NormCase& c, int64_t dim, int64_t gap, DType in, DType out) {
  const DType stream_type = c.gathered ? out : DType::kFloat32;
  const Rows hidden(kRowCount, dim, dim + gap, stream_type, 10, 1);
  const Rows delta(kRowCount, dim, dim + 8, in, 11, 1), second(kRowCount, dim, dim, in, 12, 1);
  const auto weight = random_values(dim, 13);
  const DeviceArray<float> device_weight(weight);
  const std::vector<int32_t> index = {8, 0, -1, 3, 3};
  const DeviceArray<int32_t> device_index(index);
  const auto rows = c.gathered ? static_cast<int64_t>(index.size()) : kRowCount;
  const OutputRows h(hidden, dim), y(rows, dim, dim + gap, out),
      wide(rows, dim, dim, DType::kFloat32);
  cuda::AddNormParams p;
  p.hidden = h;
  if (c.delta) p.delta = delta;
  if (c.second) p.second = second;
  p.scale = 0.5f;
  p.second_scale = -2;
  p.weight = c.weight ? device_weight.data() : nullptr;
  p.eps = 1e-5f;
  p.row_index = c.gathered ? device_index.data() : nullptr;
  p.rows = rows;
  p.dim = dim;
  p.y = y;
  if (c.wide) p.y_wide = wide;
  run_call([&](cudaStream_t stream) { cuda::add_rms_norm(p, stream); });

  reference::Values sum(hidden.values.begin(), hidden.values.end());
  for (size_t i = 0; i < sum.size(); ++i)
    sum[i] += (c.delta ? 0.5 * delta.values[i] : 0) - (c.second ? 2.0 * second.values[i] : 0);
  const auto stored = h.values();
  for (size_t i = 0; i < sum.size(); ++i)
    ASSERT_NEAR(stored[i], c.gathered ? hidden.values[i] : sum[i], 0x1p-20) << i;
  reference::Values want;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t source = c.gathered ? index[r] : r;
    for (int64_t i = 0; i < dim; ++i) want.push_back(source < 0 ? 0 : sum[source * dim + i]);
  }
  if (c.weight) want = reference::rms_norm(want, to_double(weight), rows, dim, double{1e-5f});
  expect_norm(y.values(), want, dim, out, 1);
  if (c.wide) expect_norm(wide.values(), want, dim, DType::kFloat32, 1);
}

TEST(CudaDense, ResidualStreamAndNormMatchTheDefinition) {
  REQUIRE_DEVICE();
  const NormCase cases[] = {{true, false, true, false, false}, {true, true, true, false, true},
                            {false, false, true, false, true}, {true, true, true, true, false},
                            {false, false, true, true, false}, {true, false, false, false, false}};
  for_shapes([&](int64_t dim, int64_t gap, DType in, DType out) {
    for (const auto& c : cases) check_norm(c, dim, gap, in, out);
  });
  for (const int64_t dim : {8192, 9000, 16001, 16384})
    check_norm(cases[1], dim, 0, kDtypes[1], kDtypes[1]);
}

TEST(CudaDense, NormAddsTheDeltasParts) {
  REQUIRE_DEVICE();
  for (const int64_t count : {1, 2, 3, 4, 7})
    for (const int64_t dim : {5, 264, 2560, 9000})
      for (const DType dtype : kDtypes) {
        SCOPED_TRACE(::testing::Message()
                     << count << " parts, dim " << dim << " to " << dtype_name(dtype));
        const int64_t elements = kRowCount * dim, stride = elements + 8;
        const auto weight = random_values(dim, 13), start = random_values(elements, 14);
        const auto parts = random_values(count * stride, 15);
        const DeviceArray<float> device_weight(weight), delta(parts), hidden(start);
        const OutputRows y(kRowCount, dim, dim, dtype);
        cuda::AddNormParams p;
        p.hidden = {hidden.data(), dim, DType::kFloat32};
        p.delta = {delta.data(), dim, DType::kFloat32};
        p.delta_parts = count;
        p.delta_part_stride = stride;
        p.scale = 0.5f;
        p.weight = device_weight.data();
        p.eps = 1e-5f;
        p.rows = kRowCount;
        p.dim = dim;
        p.y = y;
        run_call([&](cudaStream_t stream) { cuda::add_rms_norm(p, stream); });
        std::vector<float> got;
        hidden.download(got);
        reference::Values want(start.begin(), start.end());
        for (int64_t i = 0; i < elements; ++i) {
          for (int64_t part = 0; part < count; ++part) want[i] += 0.5 * parts[part * stride + i];
          ASSERT_NEAR(got[i], want[i], static_cast<double>(count) * 0x1p-22) << "element " << i;
        }
        want = reference::rms_norm(want, to_double(weight), kRowCount, dim, double{1e-5f});
        expect_norm(y.values(), want, dim, dtype, static_cast<double>(count));
      }
}

TEST(CudaDense, WrongArgumentsAreNamed) {
  float data[8] = {};
  const cuda::InRows x{data, 4, DType::kFloat32};
  const cuda::OutRows y{data, 4, DType::kFloat32};
  EXPECT_EQ(error_of([&] { cuda::swiglu(x, 1, 2, 4, y, nullptr); }),
            "gate_up: expected a stride of at least 8, got 4");
  EXPECT_EQ(error_of([&] { cuda::relu_squared({}, 1, 1, 4, y, nullptr); }),
            "x: expected memory, got a null pointer");
  EXPECT_EQ(error_of([&] { cuda::relu_squared(x, 0, 1, 4, y, nullptr); }),
            "scale: expected above 0, got 0");
  EXPECT_EQ(error_of([&] { cuda::add_scaled(x, 1, -1, 4, y, nullptr); }),
            "rows: expected at least 0, got -1");
  EXPECT_EQ(error_of([&] { cuda::add_scaled({data, 4, DType::kInt8}, 1, 1, 4, y, nullptr); }),
            "x: expected float32, float16 or bfloat16, got int8");
  cuda::AddNormParams p;
  p.hidden = y;
  p.rows = 1;
  p.dim = 16385;
  EXPECT_EQ(error_of([&] { cuda::add_rms_norm(p, nullptr); }),
            "dim: expected 1 to 16384, got 16385");
  EXPECT_EQ(error_of([&] { cuda::add_scaled({}, 1, 0, 4, {}, nullptr); }), "");
}

}  // namespace
}  // namespace replayssm::testing
