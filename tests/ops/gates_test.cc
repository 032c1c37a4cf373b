// Gates against their definition, up to the limits of their ranges.
#include "ops/reference/gates.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "ops/cpu/recurrent.h"

namespace replayssm {
namespace {

// Everything a projection may give: the ends of fp32 included.
const std::vector<float>& raws() {
  static const std::vector<float> values = {0,     1e-8f, -1e-8f, 0.5f,    -0.5f, 3,    -3,
                                            19.9f, 20,    20.1f,  -20,     -80,   -104, -1e30f,
                                            88.8f, 1e30f, 100,    0.6225f, 1e-30f};
  return values;
}

// fp32 functions within a few units, of numbers whose exponent may be as large as the value.
void expect_close(float got, double want) {
  EXPECT_NEAR(got, want, 8 * 0x1p-24 * std::abs(want) + std::numeric_limits<float>::min()) << want;
}

// dt at both limits, and beyond.
TEST(Gates, Mamba2MatchesTheDefinition) {
  const float infinity = std::numeric_limits<float>::infinity();
  ThreadPool pool(1);
  for (const auto& [least, most] :
       {std::pair{0.0f, infinity}, {0.001f, 0.1f}, {0.05f, 0.05f}, {0.0f, 1.0f}}) {
    const auto heads = std::ssize(raws());
    const std::vector<float> bias(heads, 0.25f), a(heads, -7.5f);
    std::vector<float> b(heads), g(heads);
    cpu::mamba2_gates({.dt = raws().data(),
                       .dt_stride = heads,
                       .dt_bias = bias.data(),
                       .a = a.data(),
                       .dt_min = least,
                       .dt_max = most,
                       .tokens = 1,
                       .heads = heads,
                       .b = b.data(),
                       .g = g.data()},
                      pool);
    for (int64_t h = 0; h < heads; ++h) {
      // The sum with the bias is an fp32 sum.
      const auto want = reference::mamba2_gate(raws()[h] + 0.25f, 0, a[h], least, most);
      expect_close(b[h], want.b);
      expect_close(g[h], want.g);
      EXPECT_GE(b[h], least);
      EXPECT_LE(b[h], most);
      EXPECT_LE(g[h], 0);
    }
  }
}

// The write strength keeps all of its fp32 bits (pitfalls 3: sigmoids rounded to bf16).
TEST(Gates, DeltaMatchesTheDefinition) {
  ThreadPool pool(1);
  const auto heads = std::ssize(raws());
  const std::vector<float> bias(heads, -0.5f), a(heads, -2.0f);
  std::vector<float> b(heads), g(heads);
  cpu::delta_gates({.beta = raws().data(),
                    .alpha = raws().data(),
                    .stride = heads,
                    .dt_bias = bias.data(),
                    .a = a.data(),
                    .tokens = 1,
                    .heads = heads,
                    .b = b.data(),
                    .g = g.data()},
                   pool);
  for (int64_t h = 0; h < heads; ++h) {
    expect_close(b[h], reference::delta_gate(raws()[h], 0, 0, 0).b);
    expect_close(g[h], reference::delta_gate(0, raws()[h] - 0.5f, 0, a[h]).g);
    EXPECT_LE(g[h], 0);
  }
}

TEST(Gates, KimiDeltaBoundsItsDecayWhereAsked) {
  EXPECT_NEAR(reference::channel_log_decay(2, -1, 0.5, 0), -std::log1p(std::exp(2.5)), 1e-12);
  EXPECT_NEAR(reference::channel_log_decay(2, -1, 0.5, -5), -5 / (1 + std::exp(-2.5)), 1e-12);
  EXPECT_GE(reference::channel_log_decay(1e4, -1, 0, -5), -5);
}

}  // namespace
}  // namespace replayssm
