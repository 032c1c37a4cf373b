// Drafts by the model's own head (model/draft_head.h).
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <tuple>

#include "engine/draft.h"
#include "engine/pass_builder.h"
#include "engine/sampler.h"
#include "engine/speculative_config.h"

namespace replayssm {

// The head's keys and values lie in the sequences' blocks, one more layer of them, at the positions
// of the hidden states that it reads. What drafts have left there is overwritten as soon as their
// positions are accepted, so that nothing has to be rolled back. A sequence that was left out of
// some calls has a hole there: the head sees it from the next block on, as if it began in it.
//
// Drafts that are nothing but the likeliest tokens are a chain of passes behind the host: each
// takes its tokens from the one before unseen, and all are read at the end.
class HeadDrafter final : public Drafter {
 public:
  // `state` tells where the sequences' states are.
  HeadDrafter(Model& model, const SpeculativeConfig& config, std::function<StateView()> state)
      : model_(model), config_(config), state_(std::move(state)) {}

  void propose(std::span<const DraftRequest> requests) override;
  void forget(int64_t request) override { seen_.erase(request); }

 private:
  // The positions of a sequence whose keys and values the head has; `from` begins a block.
  struct Seen {
    int64_t from = 0, until = 0;
  };

  void add(const Sequence& sequence, int64_t position);
  void catch_up(std::span<const DraftRequest> requests);
  void go_on(int64_t depth);
  void run(bool recycled, std::span<const int32_t> hidden_row, int64_t decodes);
  void finish_started();
  void extend(int64_t row, const DraftRequest& request);

  // A pass whose tokens have not been read.
  struct Started {
    std::vector<const DraftRequest*> open;
    std::vector<int32_t> tokens;  // [open]
  };

  Model& model_;
  SpeculativeConfig config_;
  std::function<StateView()> state_;
  std::map<int64_t, Seen> seen_;  // by request
  PassBuilder pass_;
  std::vector<const DraftRequest*> open_;  // whose drafts grow; the last pass's logits in order
  std::vector<std::tuple<Draft*, int32_t, int32_t>> siblings_;  // of drafts: token, parent
  bool by_logits_ = false;  // the drafts are; else they are the likeliest tokens
  std::vector<float> logits_;
  std::deque<Started> started_;  // the oldest first
};

}  // namespace replayssm
