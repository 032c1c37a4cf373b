// Whether a grammar has a text.
#pragma once

#include <string_view>

#include "engine/grammar.h"

namespace replayssm::testing {

inline bool admits(const Grammar& grammar, std::string_view text) {
  GrammarStates states(grammar);
  auto state = states.begin();
  for (const char byte : text) state = states.advance(state, static_cast<unsigned char>(byte));
  return GrammarStates::may_end(state);
}

}  // namespace replayssm::testing
