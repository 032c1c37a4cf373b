// Drafts by the model's own head (model/draft_head.h).
#pragma once

#include <functional>
#include <tuple>

#include "engine/draft.h"
#include "engine/pass_builder.h"
#include "engine/sampler.h"
#include "engine/speculative_config.h"

namespace replayssm {

// The head's keys and values lie in the sequences' blocks, one more layer of them, at the positions
// of the hidden states that it reads. What drafts have left there is overwritten as soon as their
// positions are accepted, so that nothing has to be rolled back.
class HeadDrafter final : public Drafter {
 public:
  // `state` tells where the sequences' states are.
  HeadDrafter(Model& model, const SpeculativeConfig& config, std::function<StateView()> state)
      : model_(model), config_(config), state_(std::move(state)) {}

  void propose(std::span<const DraftRequest> requests) override;

 private:
  void catch_up(std::span<const DraftRequest> requests);
  void go_on(int64_t depth);
  void run(bool recycled, std::span<const int32_t> hidden_row, int64_t decodes);
  void extend(int64_t row, const DraftRequest& request);

  Model& model_;
  SpeculativeConfig config_;
  std::function<StateView()> state_;
  PassBuilder pass_;
  std::vector<const DraftRequest*> open_;  // whose drafts grow; the last pass's logits in order
  std::vector<std::tuple<Draft*, int32_t, int32_t>> siblings_;  // of drafts: token, parent
  std::vector<float> logits_;
  std::vector<int32_t> tokens_;
};

}  // namespace replayssm
