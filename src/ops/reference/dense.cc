#include "ops/reference/dense.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace replayssm::reference {
namespace {

size_t at(int64_t i) { return static_cast<size_t>(i); }

double mean_square(const double* x, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i] * x[i];
  return sum / static_cast<double>(count);
}

// Indices by descending value, ties to the lower index.
std::vector<int32_t> ranking(const Values& values) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return values[at(a)] > values[at(b)]; });
  return order;
}

}  // namespace

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }

Values rms_norm(const Values& x, const Values& weight, int64_t rows, int64_t dim, double eps) {
  Values y(x.size());
  for (int64_t r = 0; r < rows; ++r) {
    const double rms = std::sqrt(mean_square(&x[at(r * dim)], dim) + eps);
    for (int64_t i = 0; i < dim; ++i) y[at(r * dim + i)] = x[at(r * dim + i)] / rms * weight[at(i)];
  }
  return y;
}

Values gated_rms_norm(const GatedNorm& s, const Values& x, const Values& gate,
                      const Values& weight) {
  Values y(x.size());
  for (int64_t g = 0; g < s.rows * s.groups; ++g) {
    const int64_t first = g * s.group_dim;
    Values in(&x[at(first)], &x[at(first)] + s.group_dim);
    Values act(in.size());
    for (size_t i = 0; i < act.size(); ++i) {
      const double z = gate[at(first) + i];
      act[i] = s.sigmoid ? sigmoid(z) : silu(z);
      if (s.gate_first) in[i] *= act[i];
    }
    const double rms = std::sqrt(mean_square(in.data(), s.group_dim) + s.eps);
    for (size_t i = 0; i < in.size(); ++i) {
      double out = in[i];
      if (!weight.empty()) {
        const int64_t channel = s.weight_per_group ? 0 : g % s.groups * s.group_dim;
        out *= weight[at(channel) + i] / rms;
      }
      y[at(first) + i] = s.gate_first ? out : out * act[i];
    }
  }
  return y;
}

Values swiglu(const Values& gate_up, int64_t rows, int64_t dim) {
  Values y(at(rows * dim));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < dim; ++i)
      y[at(r * dim + i)] = silu(gate_up[at(r * 2 * dim + i)]) * gate_up[at(r * 2 * dim + dim + i)];
  return y;
}

Values relu_squared(const Values& x) {
  Values y;
  for (const double v : x) y.push_back(v > 0 ? v * v : 0);
  return y;
}

Values sigmoid_gate(const Values& x, const Values& gate) {
  Values y;
  for (size_t i = 0; i < x.size(); ++i) y.push_back(x[i] * sigmoid(gate[i]));
  return y;
}

Values rotary(const Values& x, const std::vector<int64_t>& position,
              const std::vector<float>& inverse_frequency, int64_t rows, int64_t heads, int64_t dim,
              int64_t rotary_dim) {
  Values y = x;
  const int64_t half = rotary_dim / 2;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(position[at(r)]) * inverse_frequency[at(i)];
        const double c = std::cos(static_cast<double>(angle));
        const double s = std::sin(static_cast<double>(angle));
        const size_t first = at((r * heads + h) * dim + i), second = first + at(half);
        y[first] = x[first] * c - x[second] * s;
        y[second] = x[second] * c + x[first] * s;
      }
  return y;
}

Values attention(const Values& q, const Values& k, const Values& v, int64_t keys, double scale) {
  const size_t dim = q.size();
  Values score(at(keys));
  for (size_t j = 0; j < score.size(); ++j)
    for (size_t i = 0; i < dim; ++i) score[j] += scale * q[i] * k[j * dim + i];
  const double max = *std::max_element(score.begin(), score.end());
  double sum = 0;
  for (auto& s : score) sum += s = std::exp(s - max);
  Values out(dim);
  for (size_t j = 0; j < score.size(); ++j)
    for (size_t i = 0; i < dim; ++i) out[i] += score[j] / sum * v[j * dim + i];
  return out;
}

Routing route_experts(const RouterShape& s, const Values& logits, const Values& bias) {
  Values score(logits);
  if (s.sigmoid) {
    for (auto& v : score) v = sigmoid(v);
  } else {
    const double max = *std::max_element(score.begin(), score.end());
    double sum = 0;
    for (auto& v : score) sum += v = std::exp(v - max);
    for (auto& v : score) v /= sum;
  }
  Values choice(score);
  if (!bias.empty())
    for (size_t i = 0; i < choice.size(); ++i) choice[i] += bias[i];

  const int64_t size = s.experts / s.groups;
  Values group;
  for (int64_t g = 0; g < s.groups; ++g) {
    Values members(&choice[at(g * size)], &choice[at(g * size)] + size);
    std::sort(members.rbegin(), members.rend());
    group.push_back(members[0] + (size > 1 ? members[1] : 0));
  }
  const auto groups = ranking(group);
  for (int64_t g = s.top_groups; g < s.groups; ++g)
    for (int64_t i = 0; i < size; ++i)
      choice[at(groups[at(g)] * size + i)] = -std::numeric_limits<double>::infinity();

  Routing routing;
  const auto experts = ranking(choice);
  double sum = 0;
  for (int64_t i = 0; i < s.top_k; ++i) {
    routing.expert.push_back(experts[at(i)]);
    routing.weight.push_back(score[at(experts[at(i)])]);
    sum += routing.weight.back();
  }
  for (auto& w : routing.weight) w *= s.renormalize ? s.scale / sum : s.scale;
  return routing;
}

}  // namespace replayssm::reference
