// A point of a stream's work that the host waits for.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/check_cuda.h"

namespace replayssm {

class Event {
 public:
  Event() {
    cuda::check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "an event");
  }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) {
    cuda::check_cuda(cudaEventRecord(event_, stream), "an event");
  }
  // For what was recorded last, if anything.
  void wait() const { cuda::check_cuda(cudaEventSynchronize(event_), "the device"); }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace replayssm
