#include "server/engine_thread.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "replayssm/error.h"

namespace replayssm::server {
namespace {

using Clock = std::chrono::steady_clock;

// Grows with the number of sequences, up to what a reader does not notice.
std::chrono::milliseconds gather_time(int64_t sequences) {
  constexpr int64_t kShortest = 10, kLongest = 40;
  return std::chrono::milliseconds(std::clamp(sequences, kShortest, kLongest));
}

}  // namespace

EngineThread::EngineThread(Engine& engine, Deliver deliver)
    : engine_(engine), deliver_(std::move(deliver)), thread_([this] { run(); }) {}

EngineThread::~EngineThread() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void EngineThread::push(Command command) {
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
  }
  changed_.notify_one();
}

void EngineThread::submit(uint64_t key, Request request) {
  push({.key = key, .request = std::move(request), .kind = Command::Kind::kSubmit});
}
void EngineThread::cancel(uint64_t key) { push({.key = key, .kind = Command::Kind::kCancel}); }
void EngineThread::between_steps(std::function<void(Engine&)> look) {
  push({.look = std::move(look), .kind = Command::Kind::kLook});
}

// Waits for work; false when the thread is to end.
bool EngineThread::take(std::vector<Command>& commands) {
  std::unique_lock lock(mutex_);
  if (engine_.idle()) changed_.wait(lock, [&] { return stopping_ || !commands_.empty(); });
  commands.clear();
  std::swap(commands, commands_);
  return !stopping_;
}

void EngineThread::run() {
  std::vector<Command> commands;
  while (take(commands)) {
    for (Command& command : commands) carry_out(std::move(command));
    StepReport report;
    if (!engine_.idle()) step(report);
    report.stats = engine_.stats();
    report.running = engine_.running();
    report.waiting = engine_.waiting();
    report.free_blocks = engine_.kv().free_blocks();
    gathered_.steps.push_back(std::move(report));
    hand_out();
  }
}

void EngineThread::gather(EngineEvent event, bool urgent) {
  if (urgent) urgent_.insert(event.key);
  gathered_.events.push_back(std::move(event));
}

void EngineThread::give_up(uint64_t key, const std::string& why) {
  EngineEvent event;
  event.key = key;
  event.error = why;
  gather(std::move(event), true);
}

void EngineThread::hand_out() {
  const auto now = Clock::now();
  std::vector<EngineEvent>& events = gathered_.events;
  if (engine_.idle() || now - handed_out_ >= gather_time(engine_.running())) {
    handed_out_ = now;
    deliver_(std::exchange(gathered_, {}));
  } else if (!urgent_.empty()) {
    const auto first = std::ranges::stable_partition(events, [&](const EngineEvent& event) {
                         return !urgent_.contains(event.key);
                       }).begin();
    Delivery urgent{.events = {std::move_iterator(first), std::move_iterator(events.end())},
                    .steps = {}};
    events.erase(first, events.end());
    deliver_(std::move(urgent));
  }
  urgent_.clear();
}

void EngineThread::carry_out(Command command) {
  switch (command.kind) {
    case Command::Kind::kLook: return command.look(engine_);
    case Command::Kind::kSubmit:
      try {
        const int64_t id = engine_.add(std::move(command.request));
        ids_[command.key] = id;
        known_.insert_or_assign(id, Known{command.key});
      } catch (const Error& error) {
        give_up(command.key, error.what());
      }
      return;
    case Command::Kind::kCancel:
      if (const auto at = ids_.find(command.key); at != ids_.end()) {
        engine_.cancel(at->second);
        known_.erase(at->second);
        ids_.erase(at);
      }
  }
}

// Requests that the engine no longer knows have failed.
void EngineThread::drop_lost(const std::string& why) {
  for (auto at = ids_.begin(); at != ids_.end();) {
    if (engine_.contains(at->second)) {
      ++at;
      continue;
    }
    give_up(at->first, why);
    known_.erase(at->second);
    at = ids_.erase(at);
  }
}

void EngineThread::step(StepReport& report) {
  constexpr int kMostFailures = 3;  // in a row, after which all requests are given up
  const EngineStats before = engine_.stats();
  const auto start = Clock::now();
  std::vector<RequestOutput> outputs;
  try {
    outputs = engine_.step();
    failures_ = 0;
    broken_ = false;
  } catch (const std::exception& error) {
    drop_lost(error.what());
    if (++failures_ >= kMostFailures) {
      broken_ = true;
      for (const auto& [key, id] : ids_) engine_.cancel(id);
      drop_lost(error.what());
    }
  }
  const auto end = Clock::now();
  report.seconds = std::chrono::duration<double>(end - start).count();
  report.route = engine_.route();
  report.decode_tokens = engine_.stats().decode_tokens - before.decode_tokens;
  report.prefill_tokens = engine_.stats().prefill_tokens - before.prefill_tokens;
  report.tokens = std::ssize(outputs);
  for (RequestOutput& output : outputs) {
    const auto at = known_.find(output.request);
    if (at == known_.end()) continue;
    const bool last = output.finish != FinishReason::kNone;
    const bool first = !std::exchange(at->second.begun, true);
    const uint64_t key = at->second.key;
    gather({.key = key, .output = std::move(output), .time = end}, first || last);
    if (!last) continue;
    ids_.erase(key);
    known_.erase(at);
  }
}

}  // namespace replayssm::server
