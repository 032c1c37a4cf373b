#include "ops/reference/sequence.h"

#include <numeric>

namespace replayssm::reference {

std::vector<std::vector<double>> Sequence::outputs(std::span<const Token> window,
                                                   std::span<const int32_t> parent) const {
  std::vector<std::vector<double>> outputs;
  for (size_t i = 0; i < window.size(); ++i) {
    Sequence path = *this;
    for (const int64_t j : path_to(parent, static_cast<int64_t>(i))) path.commit(window[j]);
    outputs.push_back(read(family_, window[i], path.state_));
  }
  return outputs;
}

std::vector<int32_t> chain(int64_t tokens) {
  std::vector<int32_t> parent(tokens);
  std::iota(parent.begin(), parent.end(), -1);
  return parent;
}

}  // namespace replayssm::reference
