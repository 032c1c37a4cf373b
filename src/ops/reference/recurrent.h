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
  std::vector<double> g;  // log decay: one value, or one per column (Kimi Delta)
  double b = 0;           // write strength
};

// exp(g) of every column.
std::vector<double> recurrence_decay(const Token& token);

// k as the recurrence uses it.
std::vector<double> recurrence_key(Family family, std::span<const double> k);
// q as the recurrence uses it.
std::vector<double> recurrence_query(Family family, std::span<const double> q);

// S <- (S a)(I - d b k k^T) + b v k^T. state: [V, K].
void update(Family family, const Token& token, std::span<double> state);

// o = S q. state: [V, K]; returns [V].
std::vector<double> read(Family family, const Token& token, std::span<const double> state);

// The query of the last of `path` walked back through all of it: what then meets the state in front
// of the path, and how much of every token's v the output has.
struct Walk {
  std::vector<double> t;  // [K]
  std::vector<double> c;  // [tokens]
};
Walk walk_back(Family family, std::span<const Token> path);

// The output of the last of `path` given the state before the first, without forming a new state.
std::vector<double> read_through(Family family, std::span<const Token> path,
                                 std::span<const double> state);

// The tokens of a tree window from the root to token i, itself included. parent[j] < j, or -1.
std::vector<int64_t> path_to(std::span<const int32_t> parent, int64_t i);

// A token's output as a layer hands it on: (o + skip v) silu(z). z: [V], empty without a gate.
std::vector<double> finish_output(std::span<const double> o, double skip, std::span<const double> v,
                                  std::span<const double> z);

}  // namespace replayssm::reference
