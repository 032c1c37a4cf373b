// Drafters that know nothing but the text so far.
#pragma once

#include <map>
#include <memory>

#include "engine/draft.h"
#include "engine/speculative_config.h"
#include "engine/suffix_automaton.h"

namespace replayssm {

// Prompt lookup: what followed the last tokens where they occurred before, as many of them as
// possible, the latest occurrence first.
class NgramDrafter final : public Drafter {
 public:
  explicit NgramDrafter(const SpeculativeConfig& config) : config_(config) {}
  void propose(std::span<const DraftRequest> requests) override;

 private:
  SpeculativeConfig config_;
};

// What followed the longest suffix that occurred before most often, by an automaton of the text.
class SuffixDrafter final : public Drafter {
 public:
  explicit SuffixDrafter(const SpeculativeConfig& config) : config_(config) {}
  void propose(std::span<const DraftRequest> requests) override;
  void forget(int64_t request) override { texts_.erase(request); }

 private:
  SpeculativeConfig config_;
  std::map<int64_t, SuffixAutomaton> texts_;  // by request
};

// Adds a path to a tree; what the draft has of it already is shared.
void add_path(std::span<const int32_t> tokens, Draft& draft);

}  // namespace replayssm
