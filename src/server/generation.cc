#include "server/generation.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace replayssm::server {
namespace {

double seconds_between(Generation::Clock::time_point from, Generation::Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

Generation::Generation(const Job& job, std::vector<uint64_t> keys, AnswerWriter writer, Setup setup)
    : keys_(std::move(keys)),
      stream_(job.stream),
      tools_(job.tools),
      logprobs_(job.logprobs),
      include_usage_(job.include_usage),
      n_(job.n),
      best_of_(job.best_of),
      prompt_tokens_(job.prompt_tokens),
      prompts_(job.prompts),
      writer_(std::move(writer)),
      setup_(std::move(setup)),
      progress_(keys_.size()),
      unfinished_(keys_.size()) {
  setup_.metrics->prompt(prompt_tokens_);
}

// Keys of a job follow one another.
size_t Generation::position_of(uint64_t key) const { return key - keys_.front(); }

std::string Generation::echoed(size_t index) const {
  return prompts_.empty() ? std::string() : prompts_[index / static_cast<size_t>(best_of_)];
}

void Generation::time(Progress& progress, Clock::time_point made) {
  if (progress.tokens == 1) {
    const double seconds = seconds_between(setup_.start, made);
    setup_.metrics->first_token(seconds);
    if (first_token_seconds_ == 0) first_token_seconds_ = seconds;
  } else {
    setup_.metrics->next_token(seconds_between(progress.last, made));
  }
  progress.last = made;
}

void Generation::take(const EngineEvent& event) {
  const size_t index = position_of(event.key);
  Progress& progress = progress_[index];
  if (progress.done) return;
  if (!event.error.empty()) return fail(ApiError(500, "the model failed: " + event.error));
  ++progress.tokens;
  progress.cached = event.output.cached_tokens;
  progress.logprob_sum += event.output.token.logprob;
  time(progress, event.time);
  add_text(index, event);
  if (event.output.finish != FinishReason::kNone) end_choice(index, event.output.finish);
}

void Generation::send() {
  setup_.exchange->write(unsent_);
  unsent_.clear();
}

void Generation::add_text(size_t index, const EngineEvent& event) {
  Progress& progress = progress_[index];
  if (stream_ && !answering_) {
    answering_ = true;
    setup_.exchange->begin(
        {.content_type = "text/event-stream; charset=utf-8", .headers = setup_.headers});
  }
  const auto choice = static_cast<int64_t>(index);
  if (!std::exchange(progress.begun, true)) {
    progress.choice.text = echoed(index);
    if (stream_) {
      unsent_ += writer_.first(choice);
      if (!progress.choice.text.empty())
        writer_.text(unsent_, choice, progress.choice.text, nullptr, 0);
    }
  }
  const std::string text = tools_ ? progress.parser.push(event.output.text) : event.output.text;
  const SampledToken* token = logprobs_ ? &event.output.token : nullptr;
  if (stream_ && (!text.empty() || token)) {
    const auto offset = std::ssize(progress.choice.text);
    writer_.text(unsent_, choice, text, token, offset);
  }
  progress.choice.text += text;
  if (token && !stream_) progress.choice.tokens.push_back(*token);
}

void Generation::end_choice(size_t index, FinishReason reason) {
  Progress& progress = progress_[index];
  progress.done = true;
  progress.choice.finish = reason == FinishReason::kLength ? "length" : "stop";
  const auto choice = static_cast<int64_t>(index);
  if (tools_) {
    const std::string rest = progress.parser.finish();
    progress.choice.text += rest;
    progress.choice.calls = progress.parser.calls();
    if (stream_ && !rest.empty()) writer_.text(unsent_, choice, rest, nullptr, 0);
    if (!progress.choice.calls.empty()) {
      if (reason == FinishReason::kStop) progress.choice.finish = "tool_calls";
      if (stream_) unsent_ += writer_.calls(choice, progress.choice.calls);
    }
  }
  if (stream_) unsent_ += writer_.finish(choice, progress.choice.finish);
  if (--unfinished_ == 0) finish();
}

// Of every prompt the n likeliest of its best_of.
std::vector<Choice> Generation::best_choices() {
  std::vector<Choice> best;
  const auto group = static_cast<size_t>(best_of_), wanted = static_cast<size_t>(n_);
  for (size_t begin = 0; begin < progress_.size(); begin += group) {
    std::vector<size_t> order(group);
    std::iota(order.begin(), order.end(), begin);
    const auto likelihood = [&](size_t i) {
      return progress_[i].logprob_sum / static_cast<double>(progress_[i].tokens);
    };
    if (group > wanted) std::ranges::stable_sort(order, std::greater(), likelihood);
    for (size_t i = 0; i < wanted; ++i) best.push_back(std::move(progress_[order[i]].choice));
  }
  return best;
}

Usage Generation::usage() const {
  Usage usage{.prompt_tokens = prompt_tokens_};
  for (size_t i = 0; i < progress_.size(); ++i) {
    usage.completion_tokens += progress_[i].tokens;
    if (i % static_cast<size_t>(best_of_) == 0) usage.cached_tokens += progress_[i].cached;
  }
  return usage;
}

void Generation::finish() {
  const std::string reason = progress_.front().choice.finish;
  if (stream_) {
    if (include_usage_) unsent_ += writer_.usage(usage());
    unsent_ += writer_.done();
    send();
    setup_.exchange->end();
  } else {
    setup_.exchange->reply(
        {.body = writer_.whole(best_choices(), usage()), .headers = setup_.headers});
  }
  setup_.metrics->finished(seconds_between(setup_.start, Clock::now()));
  report(200, reason);
}

void Generation::cancel_rest() {
  for (size_t i = 0; i < progress_.size(); ++i) {
    if (!std::exchange(progress_[i].done, true)) setup_.cancel(keys_[i]);
  }
}

void Generation::fail(const ApiError& error) {
  cancel_rest();
  if (answering_) {
    unsent_ += writer_.failure(error_body(error));
    send();
    setup_.exchange->end();
  } else {
    http::Response response = error_response(error);
    response.headers.insert(response.headers.end(), setup_.headers.begin(), setup_.headers.end());
    setup_.exchange->reply(std::move(response));
  }
  report(error.status, "error");
}

void Generation::abandon() {
  cancel_rest();
  constexpr int kClientClosed = 499;  // for the log: no answer was sent
  report(kClientClosed, "abort");
}

void Generation::report(int status, const std::string& finish) {
  if (std::exchange(reported_, true)) return;
  const auto done = std::move(setup_.done);
  done({.status = status,
        .usage = usage(),
        .first_token_seconds = first_token_seconds_,
        .finish = finish});
}

}  // namespace replayssm::server
