#include "ops/reference/recurrent.h"

#include <cmath>
#include <numeric>

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

std::vector<double> recurrence_key(Family family, std::span<const double> k) {
  return scaled(k, family == Family::kGatedDelta ? inverse_norm(k) : 1);
}

std::vector<double> recurrence_query(Family family, std::span<const double> q) {
  if (family == Family::kMamba2) return scaled(q, 1);
  return scaled(q, inverse_norm(q) / std::sqrt(static_cast<double>(q.size())));
}

void update(Family family, const Token& token, std::span<double> state) {
  const auto k = recurrence_key(family, token.k);
  const double a = std::exp(token.g);
  for (size_t row = 0; row < token.v.size(); ++row) {
    const auto s = state.subspan(row * k.size(), k.size());
    for (double& value : s) value *= a;
    const double known = family == Family::kGatedDelta ? dot(s, k) : 0;
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

std::vector<double> read_through(Family family, std::span<const Token> tokens,
                                 std::span<const double> state) {
  auto t = recurrence_query(family, tokens.back().q);
  std::vector<double> o(tokens.back().v.size());
  for (size_t j = tokens.size(); j-- > 0;) {
    const auto k = recurrence_key(family, tokens[j].k);
    const double a = std::exp(tokens[j].g);
    const double c = tokens[j].b * dot(k, t);
    const double d = family == Family::kGatedDelta ? 1 : 0;
    for (size_t col = 0; col < t.size(); ++col) t[col] = a * (t[col] - d * c * k[col]);
    for (size_t row = 0; row < o.size(); ++row) o[row] += c * tokens[j].v[row];
  }
  for (size_t row = 0; row < o.size(); ++row)
    o[row] += dot(state.subspan(row * t.size(), t.size()), t);
  return o;
}

}  // namespace replayssm::reference
