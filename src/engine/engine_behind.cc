// Steps of a model that runs behind the host: while all that runs is plain decoding, a pass starts
// before the tokens of the one before it have been read. What a sequence turns out not to need,
// because its last token has ended it, is a row that nobody reads: whatever takes its slot and
// blocks comes behind that row.
#include <algorithm>
#include <utility>

#include "engine/engine_impl.h"

namespace replayssm {

// Whether the next pass could take every sequence's token from the model, unseen.
bool Engine::Impl::runs_behind(const Schedule& schedule) const {
  if (speculation || !model.runs_behind()) return false;
  if (schedule.decodes < std::ssize(schedule.windows)) return false;
  return std::ranges::all_of(schedule.windows, [&](const Window& window) {
    const Sequence& sequence = *window.sequence;
    return is_plain(sequence.sampling) && !sequence.constraint &&
           !draw_of(sequence, 0).has_penalties() &&
           (sequence.sampling.temperature == 0 || model.draws_tokens());
  });
}

// Starts the next step of the sequences that the oldest started pass has, but for those that it
// ends for certain; nothing where others are to run beside them or memory is short.
void Engine::Impl::follow() {
  const auto running = std::ssize(scheduler.running());
  const bool more = scheduler.waiting() > 0 && running < options.max_num_seqs;
  if (!model.runs_behind() || more) return;
  const Schedule& before = started.front().schedule;
  Schedule next;
  pass.clear();
  draws.clear();
  bool greedy = true;
  int64_t alive = 0;
  for (size_t row = 0; row < before.windows.size(); ++row) {
    Sequence* const sequence = before.windows[row].sequence;
    if (!sequence) continue;
    ++alive;
    const int64_t output = sequence->size() - sequence->prompt_len + 1;  // with the row's token
    if (output >= sequence->rule.max_tokens) continue;
    if (!scheduler.grow(*sequence, sequence->size() + 1)) return;
    pass.add(sequence->slot, sequence->computed + 1, sequence->blocks);
    pass.push(-2 - static_cast<int32_t>(row), -1);
    pass.want_logits();
    draws.push_back(draw_of(*sequence, 1));
    greedy = greedy && sequence->sampling.temperature == 0;
    next.windows.push_back({sequence, 1});
  }
  if (alive < running || next.windows.empty()) return;
  if (greedy) draws.clear();
  next.decodes = std::ssize(next.windows);
  batch = pass.batch(next.decodes);
  start(next);
}

// Starts the pass of `batch` and `draws`.
void Engine::Impl::start(const Schedule& schedule) {
  StartedPass begun{.schedule = schedule, .tokens = {}};
  begun.tokens.resize(schedule.windows.size());
  model.start(batch, state(), {.tokens = begun.tokens.data(), .draws = draws});
  started.push_back(std::move(begun));
}

// Concludes the oldest started pass, behind which the next one has begun.
std::vector<RequestOutput> Engine::Impl::step_behind() {
  try {
    follow();
    model.finish();
  } catch (...) {
    for (const Window& window : started.front().schedule.windows) {
      if (window.sequence) scheduler.preempt(window.sequence->id);
    }
    abandon();
    throw;
  }
  const StartedPass ended = std::move(started.front());
  started.pop_front();
  Schedule schedule;
  for (size_t row = 0; row < ended.tokens.size(); ++row) {
    if (!ended.schedule.windows[row].sequence) continue;
    tokens[schedule.windows.size()] = ended.tokens[row];
    schedule.windows.push_back(ended.schedule.windows[row]);
  }
  schedule.decodes = std::ssize(schedule.windows);
  has_tokens = true;
  return conclude(schedule);
}

// Waits for the started passes, whose tokens nobody wants.
void Engine::Impl::abandon() noexcept {
  for (; !started.empty(); started.pop_front()) {
    try {
      model.finish();
    } catch (...) {
      continue;  // the step that failed has said so
    }
  }
}

}  // namespace replayssm
