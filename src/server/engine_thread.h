// The one thread that owns an engine: takes requests from others, steps, hands out what steps made.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/engine.h"

namespace replayssm::server {

// What became of a request: one of its tokens, or its end without a token.
struct EngineEvent {
  uint64_t key = 0;  // as submitted
  RequestOutput output{};
  std::chrono::steady_clock::time_point time{};  // of the output's making
  std::string error{};                           // not empty: the request failed
};

// What a step did, for the metrics; nothing where requests alone came or went.
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
  // Events of a request come in the order of their making.
  struct Delivery {
    std::vector<EngineEvent> events;
    std::vector<StepReport> steps;
  };
  // Called on the engine's thread. A request's first and last events come with their step; others
  // are gathered over some milliseconds, because waking whoever takes them costs a small model's
  // steps more than all that is done with them.
  using Deliver = std::function<void(Delivery)>;

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
  void carry_out(Command command);
  void step(StepReport& report);
  void drop_lost(const std::string& why);
  void gather(EngineEvent event, bool urgent);
  void give_up(uint64_t key, const std::string& why);
  void hand_out();

  Engine& engine_;
  Deliver deliver_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Command> commands_;
  bool stopping_ = false;
  std::atomic<bool> broken_{false};
  // The engine's thread alone.
  std::unordered_map<uint64_t, int64_t> ids_;
  struct Known {
    uint64_t key;
    bool begun = false;  // it has put out a token
  };
  std::unordered_map<int64_t, Known> known_;  // by the engine's ids
  int failures_ = 0;
  Delivery gathered_;
  std::unordered_set<uint64_t> urgent_;  // keys whose events do not wait
  std::chrono::steady_clock::time_point handed_out_{};
  std::thread thread_;
};

}  // namespace replayssm::server
