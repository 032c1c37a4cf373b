// The recurrence in double precision, as plain loops: the definition that every backend is tested
// against. Matrices are row-major; `heads` share nothing here, each function serves one value head.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "replayssm/types.h"

namespace replayssm::reference {

// Added to the sum of squares before the root.
inline constexpr double kL2NormEps = 1e-6;

// One token of one value head. k and q are as a layer's convolution leaves them.
struct Token {
  std::vector<double> v;  // [V]
  std::vector<double> k;  // [K]
  std::vector<double> q;  // [K]
  double b = 0;           // write strength
  double g = 0;           // log decay
};

// k as the recurrence uses it.
std::vector<double> recurrence_key(Family family, std::span<const double> k);
// q as the recurrence uses it.
std::vector<double> recurrence_query(Family family, std::span<const double> q);

// S <- (S a)(I - d b k k^T) + b v k^T. state: [V, K].
void update(Family family, const Token& token, std::span<double> state);

// o = S q. state: [V, K]; returns [V].
std::vector<double> read(Family family, const Token& token, std::span<const double> state);

// The output of the last of `tokens` given the state before the first, without forming a new state:
// the query walks backwards through the tokens and meets the state in one product.
std::vector<double> read_through(Family family, std::span<const Token> tokens,
                                 std::span<const double> state);

}  // namespace replayssm::reference
