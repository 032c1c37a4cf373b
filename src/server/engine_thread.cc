#include "server/engine_thread.h"

#include <chrono>
#include <utility>

#include "replayssm/error.h"

namespace replayssm::server {
namespace {

EngineEvent failure(uint64_t key, const std::string& why) {
  EngineEvent event;
  event.key = key;
  event.error = why;
  return event;
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
  std::vector<EngineEvent> events;
  while (take(commands)) {
    events.clear();
    for (Command& command : commands) carry_out(std::move(command), events);
    report_ = {};
    if (!engine_.idle()) step(events);
    report_.stats = engine_.stats();
    report_.running = engine_.running();
    report_.waiting = engine_.waiting();
    report_.free_blocks = engine_.kv().free_blocks();
    deliver_(std::exchange(events, {}), report_);
  }
}

void EngineThread::carry_out(Command command, std::vector<EngineEvent>& events) {
  switch (command.kind) {
    case Command::Kind::kLook: return command.look(engine_);
    case Command::Kind::kSubmit:
      try {
        const int64_t id = engine_.add(std::move(command.request));
        ids_[command.key] = id;
        keys_[id] = command.key;
      } catch (const Error& error) {
        events.push_back(failure(command.key, error.what()));
      }
      return;
    case Command::Kind::kCancel:
      if (const auto at = ids_.find(command.key); at != ids_.end()) {
        engine_.cancel(at->second);
        keys_.erase(at->second);
        ids_.erase(at);
      }
  }
}

// Requests that the engine no longer knows have failed.
void EngineThread::drop_lost(const std::string& why, std::vector<EngineEvent>& events) {
  for (auto at = ids_.begin(); at != ids_.end();) {
    if (engine_.contains(at->second)) {
      ++at;
      continue;
    }
    events.push_back(failure(at->first, why));
    keys_.erase(at->second);
    at = ids_.erase(at);
  }
}

void EngineThread::step(std::vector<EngineEvent>& events) {
  constexpr int kMostFailures = 3;  // in a row, after which all requests are given up
  const EngineStats before = engine_.stats();
  const auto start = std::chrono::steady_clock::now();
  std::vector<RequestOutput> outputs;
  try {
    outputs = engine_.step();
    failures_ = 0;
    broken_ = false;
  } catch (const std::exception& error) {
    drop_lost(error.what(), events);
    if (++failures_ >= kMostFailures) {
      broken_ = true;
      for (const auto& [key, id] : ids_) engine_.cancel(id);
      drop_lost(error.what(), events);
    }
  }
  report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  report_.route = engine_.route();
  report_.decode_tokens = engine_.stats().decode_tokens - before.decode_tokens;
  report_.prefill_tokens = engine_.stats().prefill_tokens - before.prefill_tokens;
  report_.tokens = std::ssize(outputs);
  for (RequestOutput& output : outputs) {
    const auto at = keys_.find(output.request);
    if (at == keys_.end()) continue;
    events.push_back({.key = at->second, .output = std::move(output)});
    if (events.back().output.finish == FinishReason::kNone) continue;
    ids_.erase(at->second);
    keys_.erase(at);
  }
}

}  // namespace replayssm::server
