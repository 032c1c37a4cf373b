#include "ops/reference/recurrent.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/reference/dense.h"

namespace replayssm::reference {
namespace {

double dot(std::span<const double> x, std::span<const double> y) {
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
}

std::vector<double> scaled(std::span<const double> x, double factor) {
  std::vector<double> y(x.begin(), x.end());
  for (double& value : y) value *= factor;
  return y;
}

double inverse_norm(std::span<const double> x) { return 1 / std::sqrt(dot(x, x) + kL2NormEps); }

}  // namespace

std::vector<double> recurrence_decay(const Token& token) {
  std::vector<double> a(token.k.size());
  for (size_t col = 0; col < a.size(); ++col)
    a[col] = std::exp(token.g.size() == 1 ? token.g[0] : token.g[col]);
  return a;
}

std::vector<double> recurrence_key(Family family, std::span<const double> k) {
  return scaled(k, is_delta(family) ? inverse_norm(k) : 1);
}

std::vector<double> recurrence_query(Family family, std::span<const double> q) {
  if (!is_delta(family)) return scaled(q, 1);
  return scaled(q, inverse_norm(q) / std::sqrt(static_cast<double>(q.size())));
}

void update(Family family, const Token& token, std::span<double> state) {
  const auto k = recurrence_key(family, token.k), a = recurrence_decay(token);
  for (size_t row = 0; row < token.v.size(); ++row) {
    const auto s = state.subspan(row * k.size(), k.size());
    for (size_t col = 0; col < k.size(); ++col) s[col] *= a[col];
    const double known = is_delta(family) ? dot(s, k) : 0;
    const double write = token.b * (token.v[row] - known);
    for (size_t col = 0; col < k.size(); ++col) s[col] += write * k[col];
  }
}

std::vector<double> read(Family family, const Token& token, std::span<const double> state) {
  const auto q = recurrence_query(family, token.q);
  std::vector<double> o(token.v.size());
  for (size_t row = 0; row < o.size(); ++row)
    o[row] = dot(state.subspan(row * q.size(), q.size()), q);
  return o;
}

Walk walk_back(Family family, std::span<const Token> path) {
  Walk walk{recurrence_query(family, path.back().q), std::vector<double>(path.size())};
  for (size_t j = path.size(); j-- > 0;) {
    const auto k = recurrence_key(family, path[j].k), a = recurrence_decay(path[j]);
    walk.c[j] = path[j].b * dot(k, walk.t);
    const double corrected = is_delta(family) ? walk.c[j] : 0;
    for (size_t col = 0; col < k.size(); ++col)
      walk.t[col] = a[col] * (walk.t[col] - corrected * k[col]);
  }
  return walk;
}

std::vector<double> read_through(Family family, std::span<const Token> path,
                                 std::span<const double> state) {
  const Walk walk = walk_back(family, path);
  std::vector<double> o(path.back().v.size());
  for (size_t row = 0; row < o.size(); ++row) {
    o[row] = dot(state.subspan(row * walk.t.size(), walk.t.size()), walk.t);
    for (size_t j = 0; j < path.size(); ++j) o[row] += walk.c[j] * path[j].v[row];
  }
  return o;
}

std::vector<int64_t> path_to(std::span<const int32_t> parent, int64_t i) {
  std::vector<int64_t> path;
  for (; i >= 0; i = parent[i]) path.push_back(i);
  std::ranges::reverse(path);
  return path;
}

std::vector<double> finish_output(std::span<const double> o, double skip, std::span<const double> v,
                                  std::span<const double> z) {
  std::vector<double> y(o.size());
  for (size_t row = 0; row < y.size(); ++row)
    y[row] = (o[row] + skip * v[row]) * (z.empty() ? 1 : silu(z[row]));
  return y;
}

}  // namespace replayssm::reference
