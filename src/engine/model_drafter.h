// Drafts by another, smaller model.
#pragma once

#include <map>

#include "engine/draft.h"
#include "engine/engine.h"
#include "engine/kv_pool.h"
#include "engine/pass_builder.h"
#include "engine/slot_pool.h"

namespace replayssm {

// The draft model has slots and KV blocks of its own. What it knows for certain of a sequence is
// committed; its drafts are the rows of one window that grows token by token and of which, once the
// target has decided, as many rows are committed as were right: its recurrence is rolled back by
// the same cursors as the target's. Where blocks are short, sequences that nobody asks for give
// theirs up, and then there is no draft.
class ModelDrafter final : public Drafter {
 public:
  ModelDrafter(Model& model, const EngineOptions& options, int64_t kv_blocks);

  // The tokens since the last commit, at most two, and the drafts but the last.
  static int64_t longest_window(const SpeculativeConfig& config) { return config.tokens + 1; }
  static RingConfig ring_of(const EngineOptions& options);
  // The largest of its passes.
  static PassLimits limits(const EngineOptions& options);

  void propose(std::span<const DraftRequest> requests) override;
  void forget(int64_t request) override;

 private:
  // What the draft model holds of a sequence.
  struct Text {
    int32_t slot = -1;
    std::vector<int32_t> blocks{};
    int64_t committed = 0;          // of the sequence's tokens
    std::vector<int32_t> window{};  // behind them, computed in the last window
    int64_t used = 0;               // the call that asked for it last
  };

  StateView state() const;
  Text& text_of(const Sequence& sequence);
  void settle(std::span<const DraftRequest> requests);
  bool evict();
  bool grow(Text& text, int64_t tokens);
  bool prefill(const Sequence& sequence, Text& text);
  void draft(std::span<const DraftRequest* const> open, int64_t depth);
  void release(Text& text);

  Model& model_;
  SpeculativeConfig config_;
  RingConfig ring_;
  int64_t chunk_;  // tokens of a prefill
  SlotPool slots_;
  KvPool kv_;
  std::map<int64_t, Text> texts_;  // by request
  PassBuilder pass_;
  std::vector<int32_t> tokens_;
  std::vector<float> logits_;
  int64_t calls_ = 0;
};

}  // namespace replayssm
