#include "engine/suffix_automaton.h"

#include <algorithm>

namespace replayssm {

SuffixAutomaton::SuffixAutomaton() : states_(1) {}

int32_t* SuffixAutomaton::find(int32_t state, int32_t token) {
  auto& next = states_[state].next;
  const auto at = std::ranges::lower_bound(next, token, {}, &std::pair<int32_t, int32_t>::first);
  return at != next.end() && at->first == token ? &at->second : nullptr;
}

void SuffixAutomaton::set(int32_t state, int32_t token, int32_t target) {
  auto& next = states_[state].next;
  const auto at = std::ranges::lower_bound(next, token, {}, &std::pair<int32_t, int32_t>::first);
  next.insert(at, {token, target});
}

void SuffixAutomaton::append(int32_t token) {
  const auto current = static_cast<int32_t>(states_.size());
  states_.push_back({.length = states_[last_].length + 1});
  int32_t p = last_;
  while (p >= 0 && !find(p, token)) {
    set(p, token, current);
    p = states_[p].link;
  }
  if (p < 0) {
    states_[current].link = 0;
  } else {
    const int32_t q = *find(p, token);
    if (states_[q].length == states_[p].length + 1) {
      states_[current].link = q;
    } else {
      const auto clone = static_cast<int32_t>(states_.size());
      State copy = states_[q];
      copy.length = states_[p].length + 1;
      states_.push_back(std::move(copy));
      for (int32_t* target = nullptr; p >= 0 && (target = find(p, token)) && *target == q;
           p = states_[p].link) {
        *target = clone;
      }
      states_[q].link = states_[current].link = clone;
    }
  }
  last_ = current;
  ++size_;
  constexpr int kMostSuffixes = 32;
  int32_t state = current;
  for (int i = 0; i < kMostSuffixes && state > 0; ++i, state = states_[state].link)
    ++states_[state].count;
}

}  // namespace replayssm
