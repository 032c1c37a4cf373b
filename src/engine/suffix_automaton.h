// All substrings of a growing text, in memory and time linear in its length.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace replayssm {

class SuffixAutomaton {
 public:
  SuffixAutomaton();

  void append(int32_t token);
  int64_t size() const { return size_; }  // tokens appended

  // The state of the longest suffix that occurs elsewhere too; 0, the empty one, where none does.
  int32_t repeated_suffix() const { return states_[last_].link < 0 ? 0 : states_[last_].link; }
  int64_t length(int32_t state) const { return states_[state].length; }

  // What follows the substrings of a state: tokens and states.
  const std::vector<std::pair<int32_t, int32_t>>& next(int32_t state) const {
    return states_[state].next;
  }
  // How often a state's substrings were met when the text grew, one that follows counted with what
  // it follows. Long chains of suffixes are cut short: those of rare, short suffixes count too
  // little.
  int64_t count(int32_t state) const { return states_[state].count; }

 private:
  struct State {
    int64_t length = 0;
    int32_t link = -1;
    int64_t count = 0;
    std::vector<std::pair<int32_t, int32_t>> next{};  // by ascending token
  };

  int32_t* find(int32_t state, int32_t token);
  void set(int32_t state, int32_t token, int32_t target);

  std::vector<State> states_;
  int32_t last_ = 0;
  int64_t size_ = 0;
};

}  // namespace replayssm
