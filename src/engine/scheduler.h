// Which sequences run in a step, and what they hold: slots of the recurrent state and KV blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/draft.h"
#include "engine/kv_pool.h"
#include "engine/output.h"
#include "engine/sampler.h"
#include "engine/slot_pool.h"

namespace replayssm {

struct Sequence {
  int64_t id = 0;  // grows with the time of arrival
  SamplingParams sampling;
  FinishRule rule;
  std::optional<OutputText> text;
  std::vector<int32_t> tokens;  // prompt, then output
  int64_t prompt_len = 0;
  int64_t computed = 0;    // tokens that the states hold
  bool prefilling = true;  // else the last token is the only one not computed
  int32_t slot = -1;
  std::vector<int32_t> blocks;
  Draft draft;  // that the next step verifies
  Acceptance acceptance;
  int32_t snapshot = -1;  // Batch::source

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  std::span<const int32_t> prompt() const { return std::span(tokens).first(prompt_len); }
  std::span<const int32_t> output() const { return std::span(tokens).subspan(prompt_len); }
};

// The next `tokens` tokens of a sequence.
struct Window {
  Sequence* sequence = nullptr;
  int64_t tokens = 0;
};

// One step's work: decodes in front, then pieces of prompts.
struct Schedule {
  std::vector<Window> windows;
  int64_t decodes = 0;
};

struct SchedulerLimits {
  int64_t sequences = 0;
  int64_t tokens = 0;  // of a step; at least `sequences`
};

// First come, first served: every running sequence is older than every waiting one. A prompt's
// blocks are taken when it is admitted. When a decode finds no block, the youngest running sequence
// gives up what it holds and waits again, with its output as part of its prompt.
class Scheduler {
 public:
  // `kv` is null for models without attention.
  Scheduler(const SchedulerLimits& limits, SlotPool& slots, KvPool* kv)
      : limits_(limits), slots_(slots), kv_(kv) {}

  void add(std::unique_ptr<Sequence> sequence);
  Schedule next();
  void preempt(int64_t id);  // of a running sequence
  void remove(int64_t id);   // finished or cancelled; unknown ids are ignored

  bool idle() const { return waiting_.empty() && running_.empty(); }
  int64_t preemptions() const { return preemptions_; }

 private:
  using Sequences = std::vector<std::unique_ptr<Sequence>>;  // ascending ids

  static Sequences::iterator find(Sequences& sequences, int64_t id);
  bool grow(Sequence& sequence, int64_t tokens) {
    return !kv_ || kv_->grow(sequence.blocks, tokens);
  }
  void release(Sequence& sequence);
  bool make_room(int64_t index);
  void admit(int64_t budget, Schedule& schedule);

  SchedulerLimits limits_;
  SlotPool& slots_;
  KvPool* kv_;
  Sequences waiting_, running_;
  int64_t preemptions_ = 0;
};

}  // namespace replayssm
