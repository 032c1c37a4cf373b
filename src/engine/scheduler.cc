#include "engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace replayssm {

void Scheduler::add(std::unique_ptr<Sequence> sequence) { waiting_.push_back(std::move(sequence)); }

Scheduler::Sequences::iterator Scheduler::find(Sequences& sequences, int64_t id) {
  const auto at = std::ranges::lower_bound(sequences, id, {}, &Sequence::id);
  return at != sequences.end() && (*at)->id == id ? at : sequences.end();
}

void Scheduler::release(Sequence& sequence) {
  slots_.release(std::exchange(sequence.slot, -1));
  if (kv_) kv_->release(sequence.blocks);
  sequence.computed = 0;
  sequence.prefilling = true;
  sequence.draft = {};
  sequence.snapshot = -1;
}

void Scheduler::preempt(int64_t id) {
  const auto at = find(running_, id);
  REPLAYSSM_CHECK(at != running_.end(), "id=", id);
  release(**at);
  waiting_.insert(std::ranges::upper_bound(waiting_, id, {}, &Sequence::id), std::move(*at));
  running_.erase(at);
  ++preemptions_;
}

void Scheduler::remove(int64_t id) {
  if (const auto at = find(waiting_, id); at != waiting_.end()) waiting_.erase(at);
  const auto at = find(running_, id);
  if (at == running_.end()) return;
  release(**at);
  running_.erase(at);
}

// A block for the next token of running_[index], from younger sequences if need be; false when the
// sequence itself had to go.
bool Scheduler::make_room(int64_t index) {
  while (!grow(*running_[index], running_[index]->size())) {
    preempt(running_.back()->id);
    if (index == static_cast<int64_t>(running_.size())) return false;
  }
  return true;
}

Schedule Scheduler::next() {
  Schedule schedule;
  const int64_t preemptions = preemptions_;
  for (int64_t i = 0; i < static_cast<int64_t>(running_.size()); ++i) {
    if (running_[i]->prefilling) continue;
    if (make_room(i)) schedule.windows.push_back({running_[i].get(), 1});
  }
  schedule.decodes = static_cast<int64_t>(schedule.windows.size());
  int64_t budget = limits_.tokens - schedule.decodes;
  for (const auto& sequence : running_) {
    if (!sequence->prefilling || budget == 0) continue;
    const int64_t tokens = std::min(budget, sequence->size() - sequence->computed);
    schedule.windows.push_back({sequence.get(), tokens});
    budget -= tokens;
  }
  if (preemptions == preemptions_) admit(budget, schedule);
  return schedule;
}

void Scheduler::admit(int64_t budget, Schedule& schedule) {
  while (budget > 0 && !waiting_.empty() &&
         static_cast<int64_t>(running_.size()) < limits_.sequences) {
    Sequence& sequence = *waiting_.front();
    if (!grow(sequence, sequence.size() + 1)) return;
    sequence.slot = slots_.acquire();
    REPLAYSSM_CHECK(sequence.slot >= 0, "fewer slots than ", limits_.sequences);
    const int64_t tokens = std::min(budget, sequence.size());
    schedule.windows.push_back({&sequence, tokens});
    budget -= tokens;
    running_.push_back(std::move(waiting_.front()));
    waiting_.erase(waiting_.begin());
  }
}

}  // namespace replayssm
