// A step: one forward pass, the tokens it gives and what is kept of it.
#include <algorithm>
#include <chrono>

#include "core/check.h"
#include "engine/engine_impl.h"
#include "replay/cursor.h"

namespace replayssm {

bool is_plain(const SamplingParams& sampling) {
  return sampling.logit_bias.empty() && sampling.logprobs < 0;
}

TokenDraw draw_of(const Sequence& sequence, int64_t ahead) {
  const SamplingParams& sampling = sequence.sampling;
  return {.temperature = sampling.temperature,
          .top_p = sampling.top_p,
          .min_p = sampling.min_p,
          .top_k = sampling.top_k,
          .seed = sampling.seed,
          .position = sequence.size() + ahead,
          .repetition_penalty = sampling.repetition_penalty,
          .presence_penalty = sampling.presence_penalty,
          .frequency_penalty = sampling.frequency_penalty,
          .tokens = sequence.tokens,
          .prompt_length = sequence.prompt_len};
}

// Drafts give way to what has to run.
void Engine::Impl::fit_drafts(const Schedule& schedule) {
  for (int64_t i = 0; i < std::ssize(schedule.windows); ++i) {
    Sequence& sequence = *schedule.windows[i].sequence;
    const bool fits = i < schedule.decodes && !sequence.constraint &&
                      scheduler.grow(sequence, sequence.size() + sequence.draft.size());
    if (!fits) sequence.draft = {};
  }
}

// The batch of a schedule, decoding windows extended by their drafts.
void Engine::Impl::assign(const Schedule& schedule) {
  pass.clear();
  bool drafted = false;
  for (int64_t i = 0; i < std::ssize(schedule.windows); ++i) {
    const auto& [sequence, count] = schedule.windows[i];
    pass.add(sequence->slot, sequence->computed, sequence->blocks, sequence->snapshot);
    for (int64_t t = 0; t < count; ++t)
      pass.push(sequence->tokens[sequence->computed + t], static_cast<int32_t>(t) - 1);
    if (sequence->computed + count == sequence->size()) pass.want_logits();
    for (int64_t t = 0; t < sequence->draft.size(); ++t) {
      pass.push(sequence->draft.tokens[t], sequence->draft.parent_of(t) + 1);
      pass.want_logits();
    }
    drafted = drafted || sequence->draft.size() > 0;
  }
  batch = pass.batch(schedule.decodes);
  batch.deferred = drafted;
  if (speculation) batch.keep_hidden = speculation->keep_hidden();
}

// Tokens where the model can give them, else logits.
PassOutput Engine::Impl::output_for(const Schedule& schedule) {
  bool greedy = true;
  has_tokens = true;
  draws.clear();
  for (const auto& [sequence, count] : schedule.windows) {
    if (sequence->computed + count < sequence->size()) continue;
    const Draft& draft = sequence->draft;
    draws.push_back(draw_of(*sequence, 0));
    const bool penalties = draws.back().has_penalties();
    greedy = greedy && sequence->sampling.temperature == 0 && !penalties;
    // Penalties look at a draft's own tokens too.
    has_tokens = has_tokens && is_plain(sequence->sampling) && !sequence->constraint &&
                 !(penalties && draft.size() > 0) &&
                 !(speculation && speculation->needs_logits(*sequence));
    for (const int64_t depth : draft.depths()) draws.push_back(draw_of(*sequence, depth));
  }
  has_tokens = has_tokens && (greedy || model.draws_tokens());
  if (!has_tokens) {
    const int64_t count = pass.logits() * model.config().vocab_size;
    if (logits.size() < count) logits = Array<float>(count);
    return {.logits = logits.data()};
  }
  if (greedy) draws.clear();
  return {.tokens = tokens.data(), .draws = draws};
}

std::span<const float> Engine::Impl::logits_row(int64_t row) const {
  const int64_t vocab = model.config().vocab_size;
  return {logits.data() + row * vocab, static_cast<size_t>(vocab)};
}

// The token behind a sequence and those chosen already, whose logits are row `row` of the pass.
SampledToken Engine::Impl::choose(const Sequence& sequence, int64_t row,
                                  const std::vector<SampledToken>& chosen) {
  if (has_tokens) {
    if (tokens[row] < 0) fail("logits: expected a largest one, got NaN or none that is finite");
    return {.id = tokens[row]};
  }
  const auto position = sequence.size() + std::ssize(chosen);
  if (chosen.empty()) {
    return sample(logits_row(row), sequence.sampling, sequence.prompt(), sequence.output(),
                  position, allowed_next(sequence));
  }
  std::vector<int32_t> output(sequence.output().begin(), sequence.output().end());
  for (const SampledToken& token : chosen) output.push_back(token.id);
  return sample(logits_row(row), sequence.sampling, sequence.prompt(), output, position);
}

// By its constraint, and where that lets the output end, by the tokens that end it.
std::span<const uint8_t> Engine::Impl::allowed_next(const Sequence& sequence) {
  if (!sequence.constraint) return {};
  const std::span<const uint8_t> next = sequence.constraint->allowed();
  if (!sequence.constraint->may_end()) return next;
  allowed.assign(model.config().vocab_size, 0);
  std::ranges::copy(next, allowed.begin());
  for (const int32_t id : sequence.rule.stop_ids) {
    if (id >= 0 && id < std::ssize(allowed)) allowed[id] = 1;
  }
  return allowed;
}

// Follows the output; one that nothing can follow ends.
void Engine::Impl::constrain(Sequence& sequence, RequestOutput& output) {
  if (!sequence.constraint) return;
  if (std::ranges::count(sequence.rule.stop_ids, output.token.id) > 0) return;
  sequence.constraint->accept(output.token.id);
  if (!sequence.constraint->complete()) return;
  const bool ended = output.finish != FinishReason::kNone;
  if (!ended && sequence.text) output.text += sequence.text->finish();
  if (sequence.constraint->may_end()) {
    output.finish = FinishReason::kStop;
  } else if (!ended) {
    output.finish = FinishReason::kLength;
  }
}

// The next tokens of every sequence whose tokens are all computed; none for the others.
std::vector<Verdict> Engine::Impl::judge_all(const Schedule& schedule) {
  std::vector<Verdict> verdicts;
  verdicts.reserve(schedule.windows.size());
  int64_t first = 0;  // row of logits
  for (const Window& window : schedule.windows) {
    const Sequence& sequence = *window.sequence;
    Verdict& verdict = verdicts.emplace_back();
    if (sequence.computed + window.tokens < sequence.size()) continue;
    const auto choose_behind = [&](int64_t row, const std::vector<SampledToken>& chosen) {
      return choose(sequence, first + row, chosen);
    };
    try {
      if (speculation && sequence.draft.size() > 0) {
        verdict = speculation->judge(sequence, choose_behind,
                                     [&](int64_t row) { return logits_row(first + row); });
      } else {
        verdict = follow_draft({}, choose_behind);
      }
    } catch (const Error& error) {
      const int64_t id = sequence.id, position = sequence.size();
      for (const Window& other : schedule.windows) scheduler.preempt(other.sequence->id);
      abandon();
      remove(id);
      fail("request ", id, ", position ", position, ": ", error.what());
    }
    first += 1 + sequence.draft.size();
  }
  return verdicts;
}

// Gives the sequences their tokens, up to where they end, and cuts the verdicts there.
std::vector<RequestOutput> Engine::Impl::settle(const Schedule& schedule,
                                                std::vector<Verdict>& verdicts) {
  std::vector<RequestOutput> outputs;
  size_t most = 0;
  for (const Verdict& verdict : verdicts) most += verdict.tokens.size();
  outputs.reserve(most);
  for (size_t i = 0; i < schedule.windows.size(); ++i) {
    Sequence& sequence = *schedule.windows[i].sequence;
    Verdict& verdict = verdicts[i];
    size_t kept = 0;
    while (kept < verdict.tokens.size() && !verdict.ended) {
      SampledToken& token = verdict.tokens[kept++];
      sequence.tokens.push_back(token.id);
      outputs.push_back(finish_token(sequence.id, std::move(token),
                                     sequence.size() - sequence.prompt_len, sequence.rule,
                                     sequence.text ? &*sequence.text : nullptr));
      outputs.back().cached_tokens = sequence.cached;
      constrain(sequence, outputs.back());
      verdict.ended = outputs.back().finish != FinishReason::kNone;
    }
    verdict.tokens.resize(kept);
    verdict.rows.resize(kept);
  }
  return outputs;
}

// Counts what the pass has computed, and keeps of the drafted windows what was accepted.
void Engine::Impl::commit(const Schedule& schedule, const std::vector<Verdict>& verdicts) {
  std::vector<int32_t> accepted, path;
  bool moves = false;
  for (int64_t i = 0; i < std::ssize(schedule.windows); ++i) {
    const auto& [sequence, count] = schedule.windows[i];
    const bool decodes = i < schedule.decodes;
    const int64_t kept = decodes ? std::ssize(verdicts[i].rows) : count;
    (decodes ? stats.decode_tokens : stats.prefill_tokens) += kept;
    sequence->computed += kept;
    sequence->prefilling = verdicts[i].tokens.empty();
    if (!decodes) {
      commit_prefill(sequence->cursor, count, options.ring);
      scheduler.prefilled(*sequence);
      continue;
    }
    begin_step(sequence->cursor, count + sequence->draft.size(), options.ring);
    stats.folds += sequence->cursor.fold_count > 0;
    commit_step(sequence->cursor, kept, options.route);
    if (options.speculative && options.speculative->snapshots)
      sequence->snapshot = verdicts[i].rows.back();
    if (speculation) speculation->count(*sequence, kept);
    if (!batch.deferred) continue;
    accepted.push_back(static_cast<int32_t>(kept));
    path.insert(path.end(), verdicts[i].rows.begin(), verdicts[i].rows.end());
    moves = moves || verdicts[i].rows.back() != kept - 1;
    path.resize(static_cast<size_t>(batch.query_start[i + 1]));
  }
  if (!batch.deferred) return;
  path.resize(batch.token_ids.size());
  WindowCommit commit{.accepted = accepted};
  if (moves) commit.path = path;
  model.commit(batch, commit, state());
}

// Drafts behind all sequences that go on.
void Engine::Impl::draft(const Schedule& schedule, const std::vector<Verdict>& verdicts) {
  std::vector<DraftRequest> requests;
  std::vector<int32_t> rows;
  rows.reserve(batch.token_ids.size());
  for (int64_t i = 0; i < std::ssize(schedule.windows); ++i) {
    const auto& [sequence, count] = schedule.windows[i];
    sequence->draft = {};
    if (verdicts[i].ended) continue;
    const auto first = static_cast<int64_t>(rows.size());
    for (int32_t row = 0; row < (i < schedule.decodes ? std::ssize(verdicts[i].rows) : count);
         ++row) {
      const int32_t at = i < schedule.decodes ? verdicts[i].rows[row] : row;
      rows.push_back(batch.query_start[i] + at);
    }
    const bool drafts = !sequence->prefilling && !sequence->constraint;
    int64_t depth = drafts ? speculation->most_depth(*sequence) : 0;
    if (!scheduler.grow(*sequence, sequence->size() + depth)) depth = 0;
    requests.push_back({.sequence = sequence,
                        .rows = std::span(rows).subspan(first),
                        .depth = depth,
                        .draft = &sequence->draft});
  }
  speculation->propose(requests);
}

void Engine::Impl::remove(int64_t request) {
  for (StartedPass& behind : started) {
    for (Window& window : behind.schedule.windows) {
      if (window.sequence && window.sequence->id == request) window.sequence = nullptr;
    }
  }
  scheduler.remove(request);
  if (speculation) speculation->forget(request);
}

// What follows the pass of a schedule.
std::vector<RequestOutput> Engine::Impl::conclude(const Schedule& schedule) {
  const auto seconds = [](Clock::duration time) {
    return std::chrono::duration<double>(time).count();
  };
  std::vector<Verdict> verdicts = judge_all(schedule);
  const auto judged = Clock::now();
  std::vector<RequestOutput> outputs = settle(schedule, verdicts);
  const auto settled = Clock::now();
  commit(schedule, verdicts);
  const auto committed = Clock::now();
  ++stats.steps;
  if (speculation) {
    speculation->time_commit(seconds(committed - settled));
    if (schedule.decodes == std::ssize(schedule.windows))
      speculation->time_pass(schedule.decodes, pass.tokens(),
                             seconds(judged - pass_start) + seconds(committed - settled));
    draft(schedule, verdicts);
  }
  for (size_t i = 0; i < schedule.windows.size(); ++i) {
    if (verdicts[i].ended) remove(schedule.windows[i].sequence->id);
  }
  return outputs;
}

std::vector<RequestOutput> Engine::Impl::step() {
  const auto has_gone = [](const Window& window) { return !window.sequence; };
  if (!started.empty() && std::ranges::all_of(started.front().schedule.windows, has_gone))
    abandon();
  if (!started.empty()) return step_behind();
  const Schedule schedule = scheduler.next();
  if (schedule.windows.empty()) return {};
  if (speculation) fit_drafts(schedule);
  pass_start = Clock::now();
  const bool behind = runs_behind(schedule);
  try {
    assign(schedule);
    const PassOutput output = output_for(schedule);
    behind ? start(schedule) : model.forward(batch, state(), output);
  } catch (...) {
    for (const Window& window : schedule.windows) scheduler.preempt(window.sequence->id);
    throw;
  }
  return behind ? step_behind() : conclude(schedule);
}

}  // namespace replayssm
