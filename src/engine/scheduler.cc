#include "engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace replayssm {
namespace {

bool before(const Sequence& a, const Sequence& b) {
  return std::pair(a.priority, a.id) < std::pair(b.priority, b.id);
}

}  // namespace

void Scheduler::insert(Sequences& sequences, std::unique_ptr<Sequence> sequence) {
  const auto at = std::upper_bound(sequences.begin(), sequences.end(), sequence,
                                   [](const auto& a, const auto& b) { return before(*a, *b); });
  sequences.insert(at, std::move(sequence));
}

void Scheduler::add(std::unique_ptr<Sequence> sequence) { insert(waiting_, std::move(sequence)); }

Scheduler::Sequences::iterator Scheduler::find(Sequences& sequences, int64_t id) {
  return std::ranges::find(sequences, id, [](const auto& sequence) { return sequence->id; });
}

const Sequence* Scheduler::find(int64_t id) const {
  for (const Sequences* sequences : {&running_, &waiting_}) {
    for (const auto& sequence : *sequences) {
      if (sequence->id == id) return sequence.get();
    }
  }
  return nullptr;
}

// Blocks for so many tokens, those of unused prefixes if need be.
bool Scheduler::grow(Sequence& sequence, int64_t tokens) {
  if (!kv_) return true;
  while (!kv_->grow(sequence.blocks, tokens)) {
    if (!cache_ || !cache_->evict_block()) return false;
  }
  return true;
}

void Scheduler::release(Sequence& sequence) {
  slots_.release(std::exchange(sequence.slot, -1));
  if (kv_) kv_->release(sequence.blocks);
  sequence.computed = 0;
  sequence.prefilling = true;
  sequence.draft = {};
  if (!sequence.swapped) sequence.snapshot = -1;
}

void Scheduler::back_to_waiting(Sequences::iterator at) {
  release(**at);
  insert(waiting_, std::move(*at));
  running_.erase(at);
  ++stats_.preemptions;
}

void Scheduler::preempt(int64_t id) {
  const auto at = find(running_, id);
  REPLAYSSM_CHECK(at != running_.end(), "id=", id);
  back_to_waiting(at);
}

void Scheduler::restart() {
  while (!running_.empty()) back_to_waiting(std::prev(running_.end()));
  for (const auto& sequence : waiting_) sequence->swapped.reset();
  swapped_bytes_ = 0;
}

// Copies what a sequence holds to the host; false where it would not fit.
bool Scheduler::swap_out(Sequence& sequence) {
  // Of the blocks those that hold something: a draft may have taken more.
  const int64_t held = kv_ ? KvPool::blocks_for(sequence.computed) : 0;
  const int64_t blocks = kv_ ? held * kv_->block_bytes() : 0;
  if (swapped_bytes_ + slots_.slot_bytes() + blocks > limits_.swap_bytes) return false;
  SwappedState state;
  state.computed = sequence.computed;
  state.prefilling = sequence.prefilling;
  state.slot.resize(slots_.slot_bytes());
  slots_.read_slot(sequence.slot, state.slot.data());
  state.blocks.resize(blocks);
  for (int64_t i = 0; i < held; ++i) {
    kv_->read_block(sequence.blocks[i], state.blocks.data() + i * kv_->block_bytes());
  }
  swapped_bytes_ += state.bytes();
  sequence.swapped = std::move(state);
  return true;
}

void Scheduler::remove(int64_t id) {
  if (const auto at = find(waiting_, id); at != waiting_.end()) {
    if ((*at)->swapped) swapped_bytes_ -= (*at)->swapped->bytes();
    waiting_.erase(at);
  }
  const auto at = find(running_, id);
  if (at == running_.end()) return;
  release(**at);
  running_.erase(at);
}

// A block for the next token of running_[index], from sequences behind it if need be; false when
// the sequence itself had to go.
bool Scheduler::make_room(int64_t index) {
  while (!grow(*running_[index], running_[index]->size())) {
    const bool kept = swap_out(*running_.back());
    back_to_waiting(std::prev(running_.end()));
    stats_.swaps += kept;
    if (index == std::ssize(running_)) return false;
  }
  return true;
}

// How many of the tokens that a sequence still lacks its next window has. `first`: nothing else of
// the step computes prompts.
int64_t Scheduler::cut(const Sequence& sequence, int64_t budget, bool first) const {
  const int64_t left = sequence.size() - sequence.computed;
  int64_t tokens = std::min(budget, left);
  if (cache_) {
    const int64_t stop = cache_->next_due(sequence.computed, sequence.branch);
    tokens = std::min(tokens, stop - sequence.computed);
  }
  if (tokens == left) return tokens;
  const int64_t end = sequence.computed + tokens;
  const int64_t aligned = end / kPrefillChunk * kPrefillChunk - sequence.computed;
  return aligned > 0 ? aligned : first ? tokens : 0;
}

Schedule Scheduler::next() {
  Schedule schedule;
  const int64_t preemptions = stats_.preemptions;
  for (int64_t i = 0; i < std::ssize(running_); ++i) {
    if (running_[i]->prefilling) continue;
    if (make_room(i)) schedule.windows.push_back({running_[i].get(), 1});
  }
  schedule.decodes = std::ssize(schedule.windows);
  int64_t budget = limits_.tokens - schedule.decodes;
  for (const auto& sequence : running_) {
    if (!sequence->prefilling || budget == 0) continue;
    const bool first = std::ssize(schedule.windows) == schedule.decodes;
    const int64_t tokens = cut(*sequence, budget, first);
    if (tokens == 0) return schedule;
    schedule.windows.push_back({sequence.get(), tokens});
    budget -= tokens;
  }
  if (preemptions == stats_.preemptions) admit(budget, schedule);
  return schedule;
}

// Blocks and state of a prefix that was computed before; what is there of them.
bool Scheduler::take_cached(Sequence& sequence) {
  const PrefixCache::Match match = cache_->find(sequence.tokens);
  cache_->share(sequence.tokens, match.tokens, sequence.blocks);
  if (!grow(sequence, sequence.size() + 1)) {
    if (kv_) kv_->release(sequence.blocks);
    return false;
  }
  sequence.slot = slots_.acquire();
  sequence.branch = match.branch;
  if (match.tokens == 0) return true;
  REPLAYSSM_CHECK(sequence.slot >= 0, "no slot");
  if (!cache_->load(sequence.tokens, match.tokens, sequence.slot)) {
    release(sequence);
    return false;
  }
  sequence.computed = match.tokens;
  if (sequence.cached == 0) sequence.cached = match.tokens;
  stats_.cached_tokens += match.tokens;
  return true;
}

// All that a waiting sequence needs to run; false where there is not enough.
bool Scheduler::take_memory(Sequence& sequence) {
  if (!sequence.swapped && cache_) return take_cached(sequence);
  if (!grow(sequence, sequence.size() + 1)) return false;
  sequence.slot = slots_.acquire();
  if (!sequence.swapped) return true;
  const SwappedState& state = *sequence.swapped;
  slots_.write_slot(sequence.slot, state.slot.data());
  for (int64_t i = 0; kv_ && i * kv_->block_bytes() < std::ssize(state.blocks); ++i) {
    kv_->write_block(sequence.blocks[i], state.blocks.data() + i * kv_->block_bytes());
  }
  sequence.computed = state.computed;
  sequence.prefilling = state.prefilling;
  swapped_bytes_ -= state.bytes();
  sequence.swapped.reset();
  return true;
}

void Scheduler::admit(int64_t budget, Schedule& schedule) {
  while (budget > 0 && !waiting_.empty() && std::ssize(running_) < limits_.sequences) {
    Sequence& sequence = *waiting_.front();
    if (!take_memory(sequence)) return;
    REPLAYSSM_CHECK(sequence.slot >= 0, "fewer slots than ", limits_.sequences);
    sequence.cursor = slots_.cursor(sequence.slot);
    insert(running_, std::move(waiting_.front()));
    waiting_.erase(waiting_.begin());
    if (!sequence.prefilling) continue;  // decodes from the next step on
    const bool first = std::ssize(schedule.windows) == schedule.decodes;
    const int64_t tokens = cut(sequence, budget, first);
    if (tokens == 0) return;
    schedule.windows.push_back({&sequence, tokens});
    budget -= tokens;
  }
}

void Scheduler::prefilled(const Sequence& sequence) {
  if (!cache_) return;
  const bool due = cache_->due(sequence.computed, sequence.branch);
  if (!due && sequence.prefilling) return;
  const int64_t whole = sequence.computed / KvPool::kBlockSize * KvPool::kBlockSize;
  cache_->publish(std::span(sequence.tokens).first(whole), sequence.blocks,
                  due ? sequence.slot : -1);
}

}  // namespace replayssm
