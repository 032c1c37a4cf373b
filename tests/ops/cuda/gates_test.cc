// Gates on the device against their definition, up to the limits of their ranges.
#include "ops/cuda/gates.h"

#include <cmath>
#include <limits>

#include "core/dispatch.h"
#include "ops/cuda/launches.h"
#include "ops/reference/gates.h"
#include "replayssm/error.h"

namespace replayssm::testing {
namespace {

constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr int64_t kTokens = 9, kGap = 3;

// Everything a projection may give: the ends of fp32 included. Rounded to `dtype`, tokens kGap
// apart with NaN in between.
const std::vector<float> kRaws = {0,     1e-8f, -1e-8f, 0.5f,    -0.5f, 3,    -3,
                                  19.9f, 20,    20.1f,  -20,     -80,   -104, -1e30f,
                                  88.8f, 1e30f, 100,    0.6225f, 1e-30f};
const int64_t kHeads = std::ssize(kRaws);

struct Raw {
  explicit Raw(DType dtype) {
    dispatch_float(dtype, [&]<class T>() {
      std::vector<uint8_t> bytes(kTokens * (kHeads + kGap) * sizeof(T), 0xff);
      T* row = reinterpret_cast<T*>(bytes.data());
      for (int64_t t = 0; t < kTokens; ++t, row += kHeads + kGap)
        for (int64_t h = 0; h < kHeads; ++h) {
          row[h] = from_float<T>(kRaws[(h + t) % kHeads]);
          values.push_back(to_float(row[h]));
        }
      data = bytes;
    });
  }
  std::vector<float> values;  // [tokens, heads]
  DeviceArray<uint8_t> data;
};

// fp32 functions within a few units, of numbers whose exponent may be as large as the value.
void expect_close(float got, double want) {
  if (std::isinf(got) && std::abs(want) > std::numeric_limits<float>::max()) return;
  EXPECT_NEAR(got, want, 8 * 0x1p-24 * std::abs(want) + std::numeric_limits<float>::min()) << want;
}

using Outputs = std::pair<std::vector<float>, std::vector<float>>;

TEST(CudaGates, Mamba2MatchesTheDefinition) {
  REQUIRE_DEVICE();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> nan(kTokens * kHeads, std::nanf(""));
  for (const DType dtype : kDtypes) {
    const Raw raw(dtype);
    const DeviceArray<float> bias(std::vector<float>(kHeads, 0.25f));
    const DeviceArray<float> a(std::vector<float>(kHeads, -7.5f));
    for (const auto& [least, most] :
         {std::pair{0.0f, infinity}, {0.001f, 0.1f}, {0.05f, 0.05f}, {0.0f, 1.0f}}) {
      const auto [b, g] = same_in_every_run([&](bool graph) {
        const DeviceArray<float> b(nan), g(nan);
        const cuda::Mamba2GateParams p{.dt = raw.data.data(),
                                       .dtype = dtype,
                                       .dt_stride = kHeads + kGap,
                                       .dt_bias = bias.data(),
                                       .a = a.data(),
                                       .dt_min = least,
                                       .dt_max = most,
                                       .tokens = kTokens,
                                       .heads = kHeads,
                                       .b = b.data(),
                                       .g = g.data()};
        run_call([&](cudaStream_t stream) { cuda::mamba2_gates(p, stream); }, graph);
        Outputs out;
        b.download(out.first);
        g.download(out.second);
        return out;
      });
      for (size_t i = 0; i < b.size(); ++i) {
        // The sum with the bias is an fp32 sum.
        const auto want = reference::mamba2_gate(raw.values[i] + 0.25f, 0, -7.5, least, most);
        expect_close(b[i], want.b);
        expect_close(g[i], want.g);
        EXPECT_GE(b[i], least);
        EXPECT_LE(b[i], most);
        EXPECT_LE(g[i], 0);
      }
    }
  }
}

// The write strength keeps all of its fp32 bits (pitfalls 3: sigmoids rounded to bf16).
TEST(CudaGates, DeltaMatchesTheDefinition) {
  REQUIRE_DEVICE();
  const std::vector<float> nan(kTokens * kHeads, std::nanf(""));
  for (const DType dtype : kDtypes) {
    for (const bool decays : {true, false}) {
      const Raw raw(dtype);
      const DeviceArray<float> bias(std::vector<float>(kHeads, -0.5f));
      const DeviceArray<float> a(std::vector<float>(kHeads, -2.0f));
      const auto [b, g] = same_in_every_run([&](bool graph) {
        const DeviceArray<float> b(nan), g(std::vector<float>(kTokens * kHeads, 7.0f));
        const cuda::DeltaGateParams p{.beta = raw.data.data(),
                                      .alpha = decays ? raw.data.data() : nullptr,
                                      .dtype = dtype,
                                      .stride = kHeads + kGap,
                                      .dt_bias = decays ? bias.data() : nullptr,
                                      .a = decays ? a.data() : nullptr,
                                      .tokens = kTokens,
                                      .heads = kHeads,
                                      .b = b.data(),
                                      .g = decays ? g.data() : nullptr};
        run_call([&](cudaStream_t stream) { cuda::delta_gates(p, stream); }, graph);
        Outputs out;
        b.download(out.first);
        g.download(out.second);
        return out;
      });
      for (size_t i = 0; i < b.size(); ++i) {
        expect_close(b[i], reference::delta_gate(raw.values[i], 0, 0, 0).b);
        if (decays) {
          expect_close(g[i], reference::delta_gate(0, raw.values[i] - 0.5f, 0, -2).g);
          EXPECT_LE(g[i], 0);
        } else {
          EXPECT_EQ(g[i], 7.0f);
        }
      }
    }
  }
}

TEST(CudaGates, NaNStaysNaN) {
  REQUIRE_DEVICE();
  const DeviceArray<float> raw(std::vector<float>{std::nanf("")}), zero(std::vector<float>{0});
  const DeviceArray<float> b(std::vector<float>{0}), g(std::vector<float>{0});
  const cuda::Mamba2GateParams p{.dt = raw.data(),
                                 .dt_stride = 1,
                                 .dt_bias = zero.data(),
                                 .a = zero.data(),
                                 .dt_min = 0.1f,
                                 .dt_max = 0.2f,
                                 .tokens = 1,
                                 .heads = 1,
                                 .b = b.data(),
                                 .g = g.data()};
  run_call([&](cudaStream_t stream) { cuda::mamba2_gates(p, stream); });
  std::vector<float> out;
  b.download(out);
  EXPECT_TRUE(std::isnan(out[0]));
}

TEST(CudaGates, WrongArgumentsAreNamed) {
  alignas(16) float data[4];
  const cuda::Mamba2GateParams right{data, DType::kFloat32, 4, data, data, 0, 1, 1, 4, data, data};
  const auto message = [&](auto&& change) {
    auto p = right;
    change(p);
    try {
      cuda::mamba2_gates(p, nullptr);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using P = cuda::Mamba2GateParams;
  EXPECT_EQ(message([](P& p) { p.dt_stride = 3; }), "dt_stride: expected at least 4, got 3");
  EXPECT_EQ(message([](P& p) { p.dt_min = 2; }), "dt_max: expected at least dt_min = 2, got 1");
  EXPECT_EQ(message([](P& p) { p.dtype = DType::kInt8; }),
            "dtype: expected float32, float16 or bfloat16, got int8");
  EXPECT_EQ(message([](P& p) { p.g = nullptr; }), "g: expected memory, got a null pointer");
  EXPECT_EQ(message([](P& p) { p.tokens = -1; }), "tokens: expected at least 0, got -1");
  EXPECT_EQ(message([](P& p) { p.tokens = 0, p.dt = nullptr; }), "");
}

}  // namespace
}  // namespace replayssm::testing
