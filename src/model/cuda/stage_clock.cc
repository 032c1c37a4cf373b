#include "model/cuda/stage_clock.h"

#include "ops/cuda/check_cuda.h"

namespace replayssm {

void StageClock::record(size_t index, cudaStream_t stream) {
  while (events_.size() <= index) {
    cudaEvent_t event = nullptr;
    cuda::check_cuda(cudaEventCreate(&event), "stage times");
    events_.emplace_back(event);
  }
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  cuda::check_cuda(cudaStreamIsCapturing(stream, &capturing), "stage times");
  const unsigned flags =
      capturing == cudaStreamCaptureStatusActive ? cudaEventRecordExternal : cudaEventRecordDefault;
  cuda::check_cuda(cudaEventRecordWithFlags(events_[index].get(), stream, flags), "stage times");
}

void StageClock::start(cudaStream_t stream) {
  if (on_) record(2 * stages_.size(), stream);
}

void StageClock::end(Stage stage, cudaStream_t stream) {
  if (!on_) return;
  record(2 * stages_.size() + 1, stream);
  stages_.push_back(stage);
}

void StageClock::add_to(StageTimes& times) const {
  if (!on_) return;
  for (size_t i = 0; i < stages_.size(); ++i) {
    float milliseconds = 0;
    cuda::check_cuda(
        cudaEventElapsedTime(&milliseconds, events_[2 * i].get(), events_[2 * i + 1].get()),
        "stage times");
    times[stages_[i]] += milliseconds / 1e3;
  }
}

}  // namespace replayssm
