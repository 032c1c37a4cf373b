// Times the stages of passes by events on the device, captured passes too.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "model/model.h"

namespace replayssm {

class StageClock {
 public:
  // Off: nothing is recorded.
  void turn(bool on) { on_ = on; }
  bool on() const { return on_; }

  // Pass `number` is enqueued from here on, or is being replayed.
  void begin_pass(size_t number);
  void replay_pass(size_t number) { current_ = number; }
  void start(cudaStream_t stream);
  void end(Stage stage, cudaStream_t stream);

  // Adds what the stages of the last pass, which has ended, took.
  void add_to(StageTimes& times) const;

 private:
  struct Destroy {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  using Event = std::unique_ptr<CUevent_st, Destroy>;

  void record(size_t index, cudaStream_t stream);

  struct Pass {
    std::vector<Stage> stages;
    std::vector<Event> events;  // of stage i: 2 i and 2 i + 1
  };

  bool on_ = false;
  std::vector<Pass> passes_;
  size_t current_ = 0;
};

}  // namespace replayssm
