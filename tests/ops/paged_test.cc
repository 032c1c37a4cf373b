// Paged decode steps on the CPU against the recurrence in double, over flushes, rejection and rings
// that wrap; cursors; what is refused. tests/python has the element types and layouts.
#include "ops/cpu/paged.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/check.h"
#include "ops/check_paged.h"
#include "replayssm/ops.h"

namespace replayssm::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kHeads = 4, kKeyHeads = 2, kDim = 6, kState = 20, kSlots = 3;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

PagedValues values(std::vector<float>& x, int64_t s0, int64_t s1 = 0, int64_t s2 = 0) {
  return {x.data(), {s0, s1, s2}, REPLAYSSM_FLOAT32};
}
template <class T>
PagedIntegers integers(const std::vector<T>& x) {
  return {x.data(), 1, sizeof(T)};
}

// One sequence in slot 1 of three, and another row that is padding.
class Layer {
 public:
  Layer(replayssm_family family, int64_t ring, int64_t window)
      : delta_(family != REPLAYSSM_MAMBA2),
        window_(window),
        state_(kSlots * kHeads * kDim * kState) {
    p_.family = family;
    p_.rule = window > 0 ? REPLAYSSM_PAGED_WINDOW : REPLAYSSM_PAGED_SINGLE;
    p_.softplus = p_.normalise = 1;
    p_.sequences = 2;
    p_.heads = kHeads, p_.key_heads = kKeyHeads, p_.head_dim = kDim, p_.state_dim = kState;
    p_.ring = ring, p_.max_window = std::max<int64_t>(window, 1), p_.scale = 0.3f;
    fill(a_, kHeads), fill(bias_, kHeads), fill(state_, state_.size());
    if (!delta_)
      for (float& a : a_) a = -std::abs(a);
    exact_.assign(state_.begin() + kHeads * kDim * kState,
                  state_.begin() + 2 * kHeads * kDim * kState);
    cache_v_.assign(kSlots * kHeads * ring * kDim, kNan);
    cache_k_.assign(kSlots * kKeyHeads * ring * kState, kNan);
    cache_g_.assign(kSlots * kHeads * ring, kNan);
    p_.state = values(state_, kHeads * kDim * kState, kDim * kState, kState);
    p_.cache_v = values(cache_v_, kHeads * ring * kDim, ring * kDim, kDim);
    p_.cache_k = values(cache_k_, kKeyHeads * ring * kState, ring * kState, kState);
    p_.cache_g = values(cache_g_, kHeads * ring, ring, 1);
    p_.a = values(a_, 1), p_.dt_bias = values(bias_, 1);
    p_.slot = integers(slot_);
  }

  // Draws a window of `count` tokens.
  void draw(int64_t count) {
    fill(v_, count * kHeads * kDim), fill(k_, count * kKeyHeads * kState);
    fill(q_, count * kKeyHeads * kState), fill(dt_, count * kHeads), fill(beta_, count * kHeads);
    out_.assign((count + 1) * kHeads * kDim, kNan);
    p_.v = values(v_, kHeads * kDim, kDim);
    p_.k = values(k_, kKeyHeads * kState, kState), p_.q = values(q_, kKeyHeads * kState, kState);
    p_.dt = values(dt_, kHeads, 1);
    if (delta_) p_.beta = values(beta_, kHeads, 1);
    p_.out = values(out_, kHeads * kDim, kDim);
    query_start_ = {0, static_cast<int32_t>(count), static_cast<int32_t>(count)};
  }

  // One step; checks the outputs of all drawn tokens and keeps the first `accepted` of them.
  void step(ThreadPool& pool, int64_t accepted) {
    cpu::paged_step(p_, pool);
    std::vector<double> state = exact_;
    for (int64_t t = 0; t < query_start_[1]; ++t) {
      check_token(state, t);
      if (t + 1 == accepted) exact_ = state;
    }
  }

  PagedStep p_{};
  std::vector<int32_t> slot_{1, 0}, query_start_;

 private:
  void fill(std::vector<float>& x, size_t count) {
    std::normal_distribution<float> normal;
    x.resize(count);
    for (float& value : x) value = normal(random_);
  }

  // The recurrence over token t of every head; its outputs.
  void check_token(std::vector<double>& state, int64_t t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const int64_t g = h / (kHeads / kKeyHeads);
      std::vector<double> k(&k_[(t * kKeyHeads + g) * kState],
                            &k_[(t * kKeyHeads + g + 1) * kState]);
      std::vector<double> q(&q_[(t * kKeyHeads + g) * kState],
                            &q_[(t * kKeyHeads + g + 1) * kState]);
      const double step = std::log1p(std::exp(double{dt_[t * kHeads + h]} + bias_[h]));
      double weight = step, decay = std::exp(a_[h] * step);
      if (delta_) {
        normalise(k, 1), normalise(q, p_.scale);
        decay = std::exp(-std::exp(double{a_[h]}) * step);
        weight = 1 / (1 + std::exp(-double{beta_[t * kHeads + h]}));
      }
      for (int64_t r = 0; r < kDim; ++r) {
        double* s = &state[(h * kDim + r) * kState];
        double v = v_[(t * kHeads + h) * kDim + r], known = 0, o = 0;
        for (int64_t e = 0; e < kState; ++e) known += (s[e] *= decay) * k[e];
        const double write = weight * (delta_ ? v - known : v);
        for (int64_t e = 0; e < kState; ++e) o += (s[e] += write * k[e]) * q[e];
        // Sums of a few hundred products of the order of one.
        EXPECT_NEAR(out_[(t * kHeads + h) * kDim + r], o, 3e-5 * (1 + std::abs(o)));
      }
    }
  }
  static void normalise(std::vector<double>& x, double scale) {
    double sum = kL2NormEps;
    for (const double value : x) sum += value * value;
    for (double& value : x) value *= scale / std::sqrt(sum);
  }

  const bool delta_;
  const int64_t window_;
  std::mt19937 random_{5};
  std::vector<float> a_, bias_, state_, cache_v_, cache_k_, cache_g_;
  std::vector<float> v_, k_, q_, dt_, beta_, out_;
  std::vector<double> exact_;
};

class Paged : public ::testing::TestWithParam<replayssm_family> {
 protected:
  ThreadPool pool_{2};
};
INSTANTIATE_TEST_SUITE_P(Families, Paged,
                         ::testing::Values(REPLAYSSM_MAMBA2, REPLAYSSM_GATED_DELTA));

TEST_P(Paged, SingleTokensOverFlushes) {
  for (const int64_t ring : {1, 2, 5}) {
    Layer layer(GetParam(), ring, 0);
    std::vector<int32_t> write_pos{0, 0};
    std::vector<int8_t> is_flush{0, 0};
    layer.p_.write_pos = integers(write_pos);
    if (GetParam() == REPLAYSSM_MAMBA2) layer.p_.is_flush = integers(is_flush);
    for (int i = 0; i < 13; ++i) {
      is_flush[0] = write_pos[0] == ring - 1;
      layer.draw(1);
      layer.step(pool_, 1);
      write_pos[0] = is_flush[0] ? 0 : write_pos[0] + 1;
    }
  }
}

TEST_P(Paged, WindowsWithRejection) {
  constexpr int32_t kWindow = 3, kThreshold = 7, kRing = 8;
  Layer layer(GetParam(), kRing, kWindow);
  std::vector<int32_t> write_pos(kSlots, 99), origin(kSlots, 99);
  std::vector<int8_t> is_flush(kSlots, 1), first{1, 1};
  const PagedCursors cursors{2,
                             integers(layer.slot_),
                             0,
                             write_pos.data(),
                             origin.data(),
                             is_flush.data(),
                             1,
                             1,
                             1,
                             kThreshold,
                             kWindow,
                             kRing};
  cpu::paged_reset(cursors, integers(first));
  EXPECT_THAT(write_pos, ::testing::ElementsAre(99, 0, 99));
  layer.p_.write_pos = integers(write_pos), layer.p_.origin = integers(origin);
  layer.p_.is_flush = integers(is_flush);
  int flushes = 0;
  for (int i = 0; i < 20; ++i) {
    layer.draw(1 + i % kWindow);
    layer.p_.query_start = integers(layer.query_start_);
    const std::vector<int64_t> accepted{1 + i * 7 % (1 + i % kWindow), 5};
    flushes += is_flush[1];
    layer.step(pool_, accepted[0]);
    cpu::paged_commit(cursors, integers(accepted));
    EXPECT_LE(write_pos[1] + kWindow, kRing);
  }
  EXPECT_GT(flushes, 3);
  EXPECT_GT(origin[1], 0);
  EXPECT_THAT(write_pos, ::testing::ElementsAre(99, ::testing::_, 99));
}

TEST(PagedCommit, FollowsTheTable) {
  struct Row {
    int32_t write_pos, origin;
    int8_t is_flush;
    int64_t accepted;
    int32_t new_pos, new_origin;
    int8_t new_flush;
  };
  for (const Row& row :
       {Row{0, 0, 0, 2, 2, 0, 0}, Row{2, 6, 0, 1, 3, 6, 1}, Row{3, 6, 1, 2, 2, 1, 0},
        Row{3, 6, 1, 0, 0, 1, 0}, Row{2, 6, 0, 0, 2, 6, 0}}) {
    int32_t write_pos = row.write_pos, origin = row.origin;
    int8_t is_flush = row.is_flush;
    const PagedCursors cursors{1, {}, 0, &write_pos, &origin, &is_flush, 1, 1, 1, 6, 2, 8};
    paged_commit(cursors, 0, row.accepted);
    EXPECT_EQ(write_pos, row.new_pos);
    EXPECT_EQ(origin, row.new_origin);
    EXPECT_EQ(is_flush, row.new_flush);
  }
}

TEST(PagedCheck, NamesWhatIsWrong) {
  std::vector<int32_t> write_pos{0, 0};
  Layer layer(REPLAYSSM_MAMBA2, 4, 0);
  layer.draw(1);
  layer.p_.write_pos = integers(write_pos);
  check_paged(layer.p_);
  const auto expect = [&](auto&& change, const char* message) {
    PagedStep p = layer.p_;
    change(p);
    EXPECT_THAT([&] { check_paged(p); }, ThrowsMessage<Error>(HasSubstr(message)));
  };
  expect([](PagedStep& p) { p.family = REPLAYSSM_KIMI_DELTA; },
         "family: expected Mamba-2 or Gated");
  expect([](PagedStep& p) { p.key_heads = 3; }, "key_heads: expected a divisor of heads=4, got 3");
  expect([](PagedStep& p) { p.ring = 0; }, "ring: expected 1 .. 256, got 0");
  expect([](PagedStep& p) { p.max_window = 33; }, "max_window: expected 1 .. 32, got 33");
  expect([](PagedStep& p) { p.v.data = nullptr; }, "v: expected memory, got a null pointer");
  expect([](PagedStep& p) { p.q.dtype = REPLAYSSM_INT8; }, "q: expected float32, float16 or");
  expect([](PagedStep& p) { p.cache_g.dtype = REPLAYSSM_FLOAT16; }, "cache_g: expected float32");
  expect([](PagedStep& p) { p.write_pos.bytes = 2; }, "write_pos: expected integers of 1, 4 or 8");
  expect([](PagedStep& p) { p.family = REPLAYSSM_GATED_DELTA; }, "beta: expected memory");
  expect([](PagedStep& p) { p.rule = REPLAYSSM_PAGED_WINDOW, p.ring = 6; },
         "a power of two, got 6");
  expect([](PagedStep& p) { p.rule = REPLAYSSM_PAGED_WINDOW; }, "query_start: expected memory");
}

}  // namespace
}  // namespace replayssm::testing
