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

  // A pass is enqueued from here on.
  void begin_pass() { stages_.clear(); }
  void start(cudaStream_t stream);
  void end(Stage stage, cudaStream_t stream);

  // Adds what the stages of the last pass, which has ended, took. Also where it was the replay of
  // the one that was enqueued last.
  void add_to(StageTimes& times) const;

 private:
  struct Destroy {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  using Event = std::unique_ptr<CUevent_st, Destroy>;

  void record(size_t index, cudaStream_t stream);

  bool on_ = false;
  std::vector<Stage> stages_;
  std::vector<Event> events_;  // of stage i: 2 i and 2 i + 1
};

}  // namespace replayssm
