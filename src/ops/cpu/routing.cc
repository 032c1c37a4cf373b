// Chooses the experts of every token.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/check.h"
#include "ops/cpu/dense.h"
#include "ops/cpu/parallel_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/routing.cc"
#include "hwy/foreach_target.h"
// clang-format off: behind foreach_target.h
#include "ops/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

using namespace replayssm::HWY_NAMESPACE;

// The sigmoids of the logits, or e^(logit - largest).
void Scores(const float* logits, size_t count, bool sigmoid, float* scores) {
  const hn::ScalableTag<float> d;
  const auto shift = hn::Set(d, sigmoid ? 0.0f : *std::max_element(logits, logits + count));
  ForVectors(d, count, [&](size_t i, auto n) HWY_ATTR {
    const auto v = LoadF32N(d, logits + i, n);
    StoreF32N(sigmoid ? SigmoidF32(d, v) : ExpF32(d, hn::Sub(v, shift)), d, scores + i, n);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace replayssm::cpu {
namespace {

HWY_EXPORT(Scores);

constexpr float kNever = -std::numeric_limits<float>::infinity();

// The `count` largest values' indices first, ties to the lower index.
void select(const std::vector<float>& values, int64_t count, std::vector<int32_t>& order) {
  order.resize(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int32_t a, int32_t b) {
    const float x = values[static_cast<size_t>(a)], y = values[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  });
}

class Router {
 public:
  explicit Router(const RouterParams& params)
      : p_(params),
        score_(static_cast<size_t>(params.experts)),
        choice_(static_cast<size_t>(params.experts)),
        group_(static_cast<size_t>(params.groups)) {}

  void route(int64_t row) {
    HWY_DYNAMIC_DISPATCH(Scores)
    (p_.logits + row * p_.experts, score_.size(), p_.sigmoid, score_.data());
    if (!p_.sigmoid) {
      const float sum = std::accumulate(score_.begin(), score_.end(), 0.0f);
      for (auto& score : score_) score /= sum;
    }
    for (size_t i = 0; i < choice_.size(); ++i) {
      choice_[i] = score_[i] + (p_.correction_bias ? p_.correction_bias[i] : 0.0f);
      if (std::isnan(choice_[i])) choice_[i] = kNever;
    }
    if (p_.top_groups < p_.groups) drop_groups();
    select(choice_, p_.top_k, order_);

    int32_t* expert = p_.expert + row * p_.top_k;
    float* weight = p_.weight + row * p_.top_k;
    float sum = 0;
    for (int64_t k = 0; k < p_.top_k; ++k) {
      expert[k] = order_[static_cast<size_t>(k)];
      weight[k] = score_[static_cast<size_t>(expert[k])];
      sum += weight[k];
    }
    // The small term is the published routers': a sum of zero gives weights of zero.
    const float factor = p_.renormalize ? p_.scale / (sum + 1e-20f) : p_.scale;
    for (int64_t k = 0; k < p_.top_k; ++k) weight[k] *= factor;
  }

 private:
  // Takes the experts of all but the best groups out of the choice.
  void drop_groups() {
    const size_t size = choice_.size() / group_.size();
    for (size_t g = 0; g < group_.size(); ++g) {
      float best = kNever, second = kNever;
      for (size_t i = g * size; i < (g + 1) * size; ++i) {
        second = std::max(second, std::min(best, choice_[i]));
        best = std::max(best, choice_[i]);
      }
      group_[g] = size == 1 ? best : best + second;
    }
    select(group_, p_.top_groups, order_);
    for (size_t i = static_cast<size_t>(p_.top_groups); i < order_.size(); ++i) {
      const auto first = choice_.begin() + static_cast<int64_t>(size) * order_[i];
      std::fill(first, first + static_cast<int64_t>(size), kNever);
    }
  }

  const RouterParams& p_;
  std::vector<float> score_;
  std::vector<float> choice_;  // scores as they compete
  std::vector<float> group_;
  std::vector<int32_t> order_;
};

}  // namespace

void route_experts(const RouterParams& p, ThreadPool& pool) {
  REPLAYSSM_CHECK(
      p.groups > 0 && p.experts % p.groups == 0 && p.top_groups > 0 && p.top_groups <= p.groups,
      "experts=", p.experts, " groups=", p.groups, " top_groups=", p.top_groups);
  REPLAYSSM_CHECK(p.top_k > 0 && p.top_k <= p.experts / p.groups * p.top_groups, "top_k=", p.top_k,
                  " experts=", p.experts, " groups=", p.groups, " top_groups=", p.top_groups);
  parallel_rows(pool, p.rows, p.experts, [&](int64_t begin, int64_t end) {
    Router router(p);
    for (int64_t row = begin; row < end; ++row) router.route(row);
  });
}

}  // namespace replayssm::cpu

#endif  // HWY_ONCE
