// The one thread that owns an engine: takes requests from others, steps, hands out what steps made.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"

namespace replayssm::server {

// What became of a request: one of its tokens, or its end without a token.
struct EngineEvent {
  uint64_t key = 0;  // as submitted
  RequestOutput output{};
  std::string error{};  // not empty: the request failed
};

// What a step did, for the metrics.
struct StepReport {
  double seconds = 0;
  Route route = Route::kOutputOnly;
  int64_t decode_tokens = 0, prefill_tokens = 0;
  EngineStats stats{};  // sums so far
  int64_t running = 0, waiting = 0;
  int64_t tokens = 0;  // made
  int64_t free_blocks = 0;
};

class EngineThread {
 public:
  // Called on the engine's thread, once per step; the events in the order of their making.
  using Deliver = std::function<void(std::vector<EngineEvent>, const StepReport&)>;

  EngineThread(Engine& engine, Deliver deliver);
  ~EngineThread();  // gives up what still runs
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // From any thread, without waiting for a step. Keys are the caller's; each once.
  void submit(uint64_t key, Request request);
  void cancel(uint64_t key);  // unknown keys are ignored; an event may still be on its way
  // Runs `look` on the engine's thread between two steps.
  void between_steps(std::function<void(Engine&)> look);
  // Whether passes failed again and again, so that nothing can be expected of the engine.
  bool broken() const { return broken_; }

 private:
  struct Command {
    uint64_t key = 0;
    Request request{};
    std::function<void(Engine&)> look{};
    enum class Kind : uint8_t { kSubmit, kCancel, kLook } kind = Kind::kSubmit;
  };

  void push(Command command);
  void run();
  bool take(std::vector<Command>& commands);
  void carry_out(Command command, std::vector<EngineEvent>& events);
  void step(std::vector<EngineEvent>& events);
  void drop_lost(const std::string& why, std::vector<EngineEvent>& events);

  Engine& engine_;
  Deliver deliver_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Command> commands_;
  bool stopping_ = false;
  std::atomic<bool> broken_{false};
  // The engine's thread alone.
  std::unordered_map<uint64_t, int64_t> ids_;
  std::unordered_map<int64_t, uint64_t> keys_;
  int failures_ = 0;
  StepReport report_;
  std::thread thread_;
};

}  // namespace replayssm::server
