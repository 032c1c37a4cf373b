// Inputs and exact states of runs so long that errors add up.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/recurrent_harness.h"
#include "ops/recurrent_oracle.h"

namespace replayssm::testing {

inline constexpr int64_t kSteps = 100'000;

// `period` tokens, which the run repeats, with a memory of some thousand, so that errors can add
// up.
inline Inputs long_memory(const Case& c, int64_t period) {
  Inputs in = random_inputs(c, period, 61);
  for (float& g : in.g) g *= 1e-3f;
  for (float& b : in.b) b *= 0.1f;
  for (float& gate : in.gate) gate = -6 + 0.1f * gate;
  return in;
}

// The reference's state after every `sample` tokens.
inline std::vector<std::vector<double>> exact_states(const Case& c, const Inputs& in,
                                                     int64_t period, int64_t sample) {
  std::vector<reference::Token> tokens;
  for (int64_t t = 0; t < period; ++t) tokens.push_back(token_of(c, in, t, 0));
  reference::Sequence sequence(c.shape.family, c.shape.head_dim, c.shape.state_dim);
  std::vector<std::vector<double>> states;
  for (int64_t t = 1; t <= kSteps; ++t) {
    sequence.commit(tokens[(t - 1) % period]);
    if (t % sample == 0) states.emplace_back(sequence.state().begin(), sequence.state().end());
  }
  return states;
}

}  // namespace replayssm::testing
