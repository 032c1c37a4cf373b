#include "ops/cpu/dense.h"
#include "ops/dense_test_util.h"
#include "replayssm/error.h"

namespace replayssm::cpu {
namespace {

class Norms : public PerTarget {};

INSTANTIATE_TEST_SUITE_P(Targets, Norms, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         target_name);

// The sum of squares errs by at most (dim + 1) roundings, its root by half of that; the mean, the
// division and the products by one each.
double norm_units(int64_t dim) { return static_cast<double>(dim) / 2 + 8; }

TEST_P(Norms, RmsNorm) {
  for (const int64_t dim : kDims)
    for (const int64_t rows : {0, 1, 2, 13})
      for (const DType dtype : kDtypes) {
        const auto x = random_values(rows * dim, 1, 3), weight = random_values(dim, 2);
        const auto y = run_op(rows * dim, dtype, [&](ThreadPool& pool, void* out) {
          rms_norm(x.data(), weight.data(), rows, dim, 1e-5f, out, dtype, pool);
        });
        SCOPED_TRACE(testing::Message() << rows << " x " << dim << " " << dtype_name(dtype));
        expect_close(y,
                     reference::rms_norm(to_double(x), to_double(weight), rows, dim, double{1e-5f}),
                     norm_units(dim), dtype);
      }
}

TEST_P(Norms, ARowOfTheBatchGivesItsBitsAlone) {
  const int64_t rows = 37, dim = 193;
  const auto x = random_values(rows * dim, 1), weight = random_values(dim, 2);
  const auto all = run_op(rows * dim, DType::kFloat32, [&](ThreadPool& pool, void* out) {
    rms_norm(x.data(), weight.data(), rows, dim, 1e-5f, out, DType::kFloat32, pool);
  });
  for (int64_t r = 0; r < rows; ++r) {
    const auto one = run_op(dim, DType::kFloat32, [&](ThreadPool& pool, void* out) {
      rms_norm(x.data() + r * dim, weight.data(), 1, dim, 1e-5f, out, DType::kFloat32, pool);
    });
    EXPECT_TRUE(same_bits(one, {all.begin() + r * dim, all.begin() + (r + 1) * dim})) << r;
  }
}

TEST_P(Norms, HeadRmsNormLeavesTheRestOfTheRowAlone) {
  for (const int64_t dim : kDims)
    for (const int64_t heads : {1, 3}) {
      const int64_t rows = 9, stride = heads * dim + 5;
      const auto x = random_values(rows * heads * dim, 3), weight = random_values(dim, 4);
      const auto y = run_in_place(spread(x, heads * dim, stride), [&](ThreadPool& pool, float* at) {
        head_rms_norm(at, stride, weight.data(), rows, heads, dim, 1e-6f, pool);
      });
      expect_close(
          gather(y, heads * dim, stride),
          reference::rms_norm(to_double(x), to_double(weight), rows * heads, dim, double{1e-6f}),
          norm_units(dim));
    }
}

struct GatedCase {
  bool weight, weight_per_group, gate_first, sigmoid;
};

TEST_P(Norms, GatedRmsNorm) {
  const GatedCase cases[] = {{true, false, true, false},  // Mamba-2
                             {true, true, false, false},  // Gated DeltaNet
                             {true, true, false, true},   // sigmoid gate
                             {true, false, false, false}, {true, true, true, true},
                             {false, false, true, false}, {false, false, false, true}};
  for (const auto& c : cases)
    for (const int64_t dim : kDims)
      for (const DType dtype : kDtypes) {
        const int64_t rows = 5, groups = 3, stride = groups * dim + 3;
        const auto x = random_values(rows * groups * dim, 5, 2);
        const auto gate = random_values(rows * groups * dim, 6, 3);
        const auto weight = random_values(c.weight_per_group ? dim : groups * dim, 7);
        const auto gate_rows = spread(gate, groups * dim, stride);
        const auto y = run_op(rows * groups * dim, dtype, [&](ThreadPool& pool, void* out) {
          GatedNormParams p;
          p.x = x.data();
          p.gate = gate_rows.data();
          p.gate_stride = stride;
          p.weight = c.weight ? weight.data() : nullptr;
          p.rows = rows;
          p.groups = groups;
          p.group_dim = dim;
          p.weight_per_group = c.weight_per_group;
          p.gate_first = c.gate_first;
          p.activation = c.sigmoid ? GateActivation::kSigmoid : GateActivation::kSilu;
          p.eps = 1e-5f;
          p.y = out;
          p.dtype = dtype;
          gated_rms_norm(p, pool);
        });
        const reference::GatedNorm shape{rows,         groups,    dim,          c.weight_per_group,
                                         c.gate_first, c.sigmoid, double{1e-5f}};
        // An activation errs by 4 ulp; it enters the value and, gated first, the sum of squares.
        SCOPED_TRACE(testing::Message() << dim << " " << dtype_name(dtype));
        expect_close(y,
                     reference::gated_rms_norm(shape, to_double(x), to_double(gate),
                                               c.weight ? to_double(weight) : reference::Values()),
                     norm_units(dim) + 20, dtype);
      }
}

TEST(NormContracts, StridesBelowARowAreRefused) {
  ThreadPool pool(1);
  std::vector<float> x(16);
  EXPECT_THROW(head_rms_norm(x.data(), 7, x.data(), 2, 2, 4, 1e-5f, pool), Error);
  GatedNormParams p{.gate_stride = 7, .rows = 2, .groups = 2, .group_dim = 4};
  EXPECT_THROW(gated_rms_norm(p, pool), Error);
}

}  // namespace
}  // namespace replayssm::cpu
