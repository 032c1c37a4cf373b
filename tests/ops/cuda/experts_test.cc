// Mixtures of experts on the device against their definitions.
#include "ops/cuda/experts.h"

#include <numeric>
#include <set>

#include "ops/cuda/device_rows.h"

namespace replayssm::testing {
namespace {

struct Choice {
  std::vector<int32_t> expert;
  std::vector<float> weight;
};

Choice route(RouterParams p, const std::vector<float>& logits, const std::vector<float>& bias) {
  const DeviceArray<float> device_logits(logits), device_bias(bias);
  p.logits = device_logits.data();
  p.correction_bias = bias.empty() ? nullptr : device_bias.data();
  p.rows = static_cast<int64_t>(logits.size()) / p.experts;
  const DeviceArray<int32_t> expert(std::vector<int32_t>(p.rows * p.top_k, -7));
  const DeviceArray<float> weight(std::vector<float>(p.rows * p.top_k, kNan));
  p.expert = expert.data();
  p.weight = weight.data();
  run_call([&](cudaStream_t stream) { cuda::route_experts(p, stream); });
  Choice choice;
  expert.download(choice.expert);
  weight.download(choice.weight);
  return choice;
}

// How experts compete, without groups.
reference::Values competing(const RouterParams& p, const reference::Values& logits,
                            const reference::Values& bias) {
  reference::RouterShape all{
      .experts = p.experts, .top_k = p.experts, .sigmoid = p.sigmoid, .renormalize = false};
  const auto routing = reference::route_experts(all, logits, {});
  reference::Values value(logits.size());
  for (size_t i = 0; i < value.size(); ++i) value[routing.expert[i]] = routing.weight[i];
  for (size_t i = 0; i < bias.size(); ++i) value[i] += bias[i];
  return value;
}

TEST(CudaExperts, RoutingMatchesTheDefinition) {
  REQUIRE_DEVICE();
  std::vector<RouterParams> cases(8);
  const auto set = [&](size_t i, int64_t experts, int64_t top_k, int64_t groups,
                       int64_t top_groups) {
    cases[i].experts = experts, cases[i].top_k = top_k;
    cases[i].groups = groups, cases[i].top_groups = top_groups;
  };
  set(0, 128, 6, 1, 1), cases[0].sigmoid = true, cases[0].scale = 2.5f;
  set(1, 512, 10, 1, 1);
  set(2, 64, 8, 8, 3), cases[2].sigmoid = true;
  set(3, 7, 7, 1, 1), cases[3].renormalize = false, cases[3].scale = 3;
  set(4, 6, 2, 6, 4);
  set(5, 1, 1, 1, 1), cases[5].sigmoid = true;
  set(6, 1024, 32, 64, 40);
  set(7, 256, 8, 8, 4), cases[7].sigmoid = true;
  for (const auto& p : cases)
    for (const bool with_bias : {false, true}) {
      SCOPED_TRACE(::testing::Message() << p.experts << " experts, bias " << with_bias);
      const auto logits = random_values(75 * p.experts, 1, 2);
      const auto bias = random_values(with_bias ? p.experts : 0, 2, 0.3f);
      const auto choice = route(p, logits, bias);
      const reference::RouterShape shape{p.experts, p.top_k,       p.groups,       p.top_groups,
                                         p.sigmoid, p.renormalize, double{p.scale}};
      for (int64_t r = 0; r < 75; ++r) {
        const auto row =
            to_double({logits.begin() + r * p.experts, logits.begin() + (r + 1) * p.experts});
        const auto want = reference::route_experts(shape, row, to_double(bias));
        const auto value = competing(p, row, to_double(bias));
        std::set<int32_t> chosen;
        for (int64_t k = 0; k < p.top_k; ++k) {
          const int32_t got = choice.expert[r * p.top_k + k];
          ASSERT_TRUE(got >= 0 && got < p.experts && chosen.insert(got).second) << got;
          // Values that fp32 cannot tell apart may change places.
          ASSERT_NEAR(value[got], value[want.expert[k]], 1e-6) << "row " << r << " choice " << k;
          ASSERT_NEAR(choice.weight[r * p.top_k + k], want.weight[k],
                      1e-5 * std::abs(want.weight[k]) + 1e-6);
        }
      }
    }
}

TEST(CudaExperts, TiesGoToTheLowerExpertAndNanIsNeverChosen) {
  REQUIRE_DEVICE();
  RouterParams p;
  p.experts = 40;
  p.top_k = 3;
  std::vector<float> logits(40, 1.0f);
  logits[0] = kNan;
  p.sigmoid = true;
  EXPECT_EQ(route(p, logits, {}).expert, (std::vector<int32_t>{1, 2, 3}));
}

struct ProductCase {
  cuda::ExpertShape shape;
  int64_t in, out, live;
  DType dtype, y;
  bool x_per_row, bias;
};

void check_product(const ProductCase& c) {
  const auto& s = c.shape;
  SCOPED_TRACE(::testing::Message() << s.rows << "x" << s.top_k << " of " << s.experts << ", "
                                    << c.in << " to " << c.out << " " << dtype_name(c.dtype));
  const int64_t pairs = s.rows * s.top_k;
  // Uneven: half of the pairs want one expert, some want none. Those of no row are out of range.
  std::mt19937 random(5);
  std::vector<int32_t> expert;
  for (int64_t i = 0; i < pairs; ++i)
    expert.push_back(i >= c.live * s.top_k ? 1 << 30
                     : random() % 2 == 0   ? static_cast<int32_t>(s.experts - 1)
                                           : static_cast<int32_t>(random() % s.experts / 2));
  const Rows x(c.x_per_row ? s.rows : pairs, c.in, c.in + 8, c.dtype, 1, 1);
  const Rows weight(s.experts * c.out, c.in, c.in, c.dtype, 2, 1);
  const auto bias = random_values(s.experts * c.out, 3);
  const DeviceArray<int32_t> device_expert(expert),
      live(std::vector<int32_t>{static_cast<int32_t>(c.live)});
  const DeviceArray<float> device_bias(bias);
  const DeviceArray<uint8_t> memory(std::vector<uint8_t>(cuda::expert_plan_bytes(s), 0xff));
  const auto got =
      run_rows(pairs, c.out, c.out + 3, c.y, [&](const cuda::OutRows& y, cudaStream_t stream) {
        cuda::ExpertProductParams p;
        p.plan = {s, memory.data()};
        p.x = x;
        p.x_per_row = c.x_per_row;
        p.weight = weight.data.data();
        p.bias = c.bias ? device_bias.data() : nullptr;
        p.in = c.in;
        p.out = c.out;
        p.y = y;
        cuda::sort_by_expert(p.plan, device_expert.data(), live.data(), stream);
        cuda::expert_product(p, stream);
      });
  for (int64_t i = 0; i < pairs; ++i)
    for (int64_t o = 0; o < c.out; ++o) {
      const float y = got[i * c.out + o];
      if (i >= c.live * s.top_k) {
        ASSERT_TRUE(std::isnan(y)) << "pair " << i;
        continue;
      }
      const float* a = &x.values[(c.x_per_row ? i / s.top_k : i) * c.in];
      const float* b = &weight.values[(expert[i] * c.out + o) * c.in];
      double sum = c.bias ? bias[expert[i] * c.out + o] : 0, magnitude = std::abs(sum);
      for (int64_t k = 0; k < c.in; ++k) {
        sum += double{a[k]} * b[k];
        magnitude += std::abs(double{a[k]} * b[k]);
      }
      ASSERT_NEAR(y, sum,
                  magnitude * (static_cast<double>(c.in) + 2) * 0x1p-24 +
                      std::abs(sum) * unit(c.y) + 0x1p-25)
          << "pair " << i << " output " << o;
    }
}

TEST(CudaExperts, ProductsMatchTheDefinition) {
  REQUIRE_DEVICE();
  for (const DType dtype : kDtypes)
    for (const DType y : {dtype, DType::kFloat32}) {
      check_product({{1, 8, 128}, 256, 192, 1, dtype, y, true, false});
      check_product({{37, 6, 16}, 264, 72, 30, dtype, y, true, true});
      check_product({{9, 2, 4}, 8, 7, 9, dtype, y, false, false});
      check_product({{200, 4, 8}, 136, 130, 150, dtype, y, false, true});
      check_product({{3, 1, 1}, 64, 64, 0, dtype, y, false, false});
    }
}

TEST(CudaExperts, CombinedRowsMatchTheDefinition) {
  REQUIRE_DEVICE();
  for (const DType dtype : kDtypes)
    for (const int64_t dim : {64, 70})
      for (const int what : {0, 1, 2, 3}) {  // bit 0: no experts, bit 1: no gate
        constexpr int64_t kRows = 5, kLive = 4, kTopK = 3;
        const Rows x(kRows * kTopK, dim, dim + 8, dtype, 1, 1),
            shared(kRows, dim, dim + 8, dtype, 2, 1), gate(kRows, 1, 4, dtype, 3, 2);
        const auto weight = random_values(kRows * kTopK, 4);
        const DeviceArray<float> device_weight(weight);
        const DeviceArray<int32_t> live(std::vector<int32_t>{kLive});
        const auto got =
            run_rows(kRows, dim, dim + 8, dtype, [&](const cuda::OutRows& y, cudaStream_t stream) {
              cuda::CombineParams p;
              if (!(what & 1)) p.x = x;
              p.weight = device_weight.data();
              p.shared = shared;
              if (!(what & 2)) p.shared_gate = gate;
              p.live_rows = live.data();
              p.rows = kRows;
              p.top_k = kTopK;
              p.dim = dim;
              p.y = y;
              cuda::combine_experts(p, stream);
            });
        for (int64_t r = 0; r < kRows; ++r)
          for (int64_t i = 0; i < dim; ++i) {
            double sum = 0, magnitude = 0;
            const auto add = [&](double term) { sum += term, magnitude += std::abs(term); };
            for (int64_t k = 0; k < kTopK && !(what & 1); ++k)
              add(double{weight[r * kTopK + k]} * x.values[(r * kTopK + k) * dim + i]);
            add((what & 2 ? 1 : reference::sigmoid(gate.values[r])) * shared.values[r * dim + i]);
            ASSERT_NEAR(got[r * dim + i], r < kLive ? sum : 0,
                        magnitude * 16 * 0x1p-24 + std::abs(sum) * unit(dtype) + 0x1p-25);
          }
      }
}

TEST(CudaExperts, WrongArgumentsAreNamed) {
  RouterParams p;
  p.experts = 1025;
  EXPECT_EQ(error_of([&] { cuda::route_experts(p, nullptr); }),
            "experts: expected 1 to 1024, got 1025");
  p.experts = 8, p.top_k = 9;
  EXPECT_EQ(error_of([&] { cuda::route_experts(p, nullptr); }), "top_k: expected 1 to 8, got 9");
  p.top_k = 2, p.groups = 3;
  EXPECT_EQ(error_of([&] { cuda::route_experts(p, nullptr); }),
            "groups: expected a divisor of 8 experts, got 3");
  alignas(16) int32_t data[8] = {};
  cuda::ExpertProductParams e;
  e.plan = {{1, 1, 2}, data};
  e.in = 4, e.out = 4;
  e.x = {data, 4, DType::kBFloat16};
  e.y = {data, 4, DType::kBFloat16};
  e.weight = data;
  EXPECT_EQ(error_of([&] { cuda::expert_product(e, nullptr); }),
            "x: expected rows at multiples of 16 bytes");
  e.plan.memory = nullptr;
  EXPECT_EQ(error_of([&] { cuda::expert_product(e, nullptr); }),
            "plan.memory: expected memory, got a null pointer");
}

}  // namespace
}  // namespace replayssm::testing
