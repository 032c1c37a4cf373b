// What the engine does beyond plain decoding: drafts, how deep they are, and what became of them.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "engine/depth_control.h"
#include "engine/draft.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "engine/verify.h"

namespace replayssm {

class Speculation {
 public:
  Speculation(Model& model, const EngineOptions& options, const MemoryPlan& plan,
              std::function<StateView()> state);

  KeepHidden keep_hidden() const;

  // Most tokens that the draft behind a sequence may be deep.
  int64_t most_depth(const Sequence& sequence) const;
  // Chooses depths up to those of the requests, and drafts.
  void propose(std::span<DraftRequest> requests);
  void forget(int64_t request);

  // The next tokens of a sequence whose draft was computed.
  Verdict judge(const Sequence& sequence, const ChooseToken& choose,
                const std::function<std::span<const float>(int64_t row)>& logits) const;
  // Whether a sequence's tokens are decided by probabilities, which need logits.
  bool needs_logits(const Sequence& sequence) const;

  // A verified draft of which `kept` tokens of the window stay, the model's own included.
  void count(Sequence& sequence, int64_t kept);
  // A pass over `rows` rows of `sequences` decoding sequences and nothing else took so long.
  void time_pass(int64_t sequences, int64_t rows, double seconds);
  void time_commit(double seconds) { stats_.commit_seconds += seconds; }

  const SpeculationStats& stats() const { return stats_; }

 private:
  std::vector<DraftRequest> awake(std::span<const DraftRequest> requests) const;

  SpeculativeConfig config_;
  std::unique_ptr<Drafter> drafter_;
  DepthControl depths_;
  std::optional<SimulatedAcceptance> simulated_;
  SpeculationStats stats_;
};

// Throws Error for a configuration that the model, or the draft model, does not allow.
void check_speculation(const EngineOptions& options, const Model& model);

}  // namespace replayssm
