// What a slot of a pool means: the sequence of its committed tokens, one value head, in double.
//
// A copied slot is a copy of this object. A fold, wherever to, and a flush change nothing in it; a
// rejected token is one that is not committed; compaction is the order of the committed path.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/reference/recurrent.h"

namespace replayssm::reference {

class Sequence {
 public:
  Sequence(Family family, int64_t head_dim, int64_t state_dim)
      : family_(family), state_(head_dim * state_dim) {}

  // The outputs of a window's tokens, each behind the committed tokens and its ancestors.
  std::vector<std::vector<double>> outputs(std::span<const Token> window,
                                           std::span<const int32_t> parent) const;

  void commit(const Token& token) { update(family_, token, state_); }

  std::span<double> state() { return state_; }  // [V, K]

 private:
  Family family_;
  std::vector<double> state_;
};

// parent of a window that is a chain.
std::vector<int32_t> chain(int64_t tokens);

}  // namespace replayssm::reference
