// Which sequences run in a step, and what they hold: slots of the recurrent state and KV blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/draft.h"
#include "engine/kv_pool.h"
#include "engine/output.h"
#include "engine/prefix_cache.h"
#include "engine/sampler.h"
#include "engine/slot_pool.h"

namespace replayssm {

// What a preempted sequence held, on the host.
struct SwappedState {
  std::vector<std::byte> slot;
  std::vector<std::byte> blocks;
  int64_t computed = 0;
  bool prefilling = false;

  int64_t bytes() const { return std::ssize(slot) + std::ssize(blocks); }
};

struct Sequence {
  int64_t id = 0;        // grows with the time of arrival
  int64_t priority = 0;  // the smaller, the sooner
  SamplingParams sampling;
  FinishRule rule;
  std::optional<OutputText> text;
  std::shared_ptr<TokenConstraint> constraint;  // may be null
  std::vector<int32_t> tokens;                  // prompt, then output
  int64_t prompt_len = 0;
  int64_t computed = 0;    // tokens that the states hold
  bool prefilling = true;  // else the last token is the only one not computed
  int32_t slot = -1;
  Cursor cursor{};  // what the slot's must be by now, without asking the device
  std::vector<int32_t> blocks;
  int64_t cached = 0;  // tokens whose states came from the prefix cache
  int64_t branch = 0;  // where the prefix cache wants a snapshot; 0 = nowhere in particular
  std::optional<SwappedState> swapped;
  Draft draft;  // that the next step verifies
  Acceptance acceptance;
  int64_t undrafted = 0;  // passes since a draft was wanted
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
  int64_t tokens = 0;      // of a step; at least `sequences`
  int64_t swap_bytes = 0;  // on the host, for the states of preempted sequences
};

struct SchedulerStats {
  int64_t preemptions = 0;
  int64_t swaps = 0;  // of them kept what they held
  int64_t cached_tokens = 0;
};

// By priority; within one, first come, first served. A prompt's blocks are taken when it is
// admitted. When a decode finds no block, the last of the running sequences gives up what it holds
// and waits again: its state moves to the host where there is room, else its output becomes part of
// its prompt. Prompts are cut on multiples of kPrefillChunk tokens, so that what a request computes
// does not depend on its neighbours.
class Scheduler {
 public:
  // `kv` is null for models without attention, `cache` where prefixes are not kept.
  Scheduler(const SchedulerLimits& limits, SlotPool& slots, KvPool* kv,
            PrefixCache* cache = nullptr)
      : limits_(limits), slots_(slots), kv_(kv), cache_(cache) {}

  void add(std::unique_ptr<Sequence> sequence);
  Schedule next();
  // A window of a prompt was computed.
  void prefilled(const Sequence& sequence);
  // Takes the KV blocks of so many tokens; kept prefixes that nobody uses give way. False where
  // there are none, and then nothing has changed but those.
  bool grow(Sequence& sequence, int64_t tokens);
  void preempt(int64_t id);  // a running sequence, whose state is lost
  void restart();            // every sequence: all states are lost
  void remove(int64_t id);   // finished or cancelled; unknown ids are ignored

  bool idle() const { return waiting_.empty() && running_.empty(); }
  const Sequence* find(int64_t id) const;
  const std::vector<std::unique_ptr<Sequence>>& running() const { return running_; }
  int64_t waiting() const { return std::ssize(waiting_); }
  const SchedulerStats& stats() const { return stats_; }

 private:
  using Sequences = std::vector<std::unique_ptr<Sequence>>;  // by rank

  static Sequences::iterator find(Sequences& sequences, int64_t id);
  static void insert(Sequences& sequences, std::unique_ptr<Sequence> sequence);
  void release(Sequence& sequence);
  bool make_room(int64_t index);
  void back_to_waiting(Sequences::iterator at);
  bool swap_out(Sequence& sequence);
  bool take_cached(Sequence& sequence);
  bool take_memory(Sequence& sequence);
  int64_t cut(const Sequence& sequence, int64_t budget, bool first) const;
  void admit(int64_t budget, Schedule& schedule);

  SchedulerLimits limits_;
  SlotPool& slots_;
  KvPool* kv_;
  PrefixCache* cache_;
  Sequences waiting_, running_;
  int64_t swapped_bytes_ = 0;
  SchedulerStats stats_;
};

}  // namespace replayssm
