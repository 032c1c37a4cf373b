#include "model/cuda/stage_clock.h"

#include "ops/cuda/check_cuda.h"

namespace replayssm {

void StageClock::begin_pass(size_t number) {
  if (passes_.size() <= number) passes_.resize(number + 1);
  passes_[number].stages.clear();
  current_ = number;
}

void StageClock::record(size_t index, cudaStream_t stream) {
  std::vector<Event>& events = passes_[current_].events;
  while (events.size() <= index) {
    cudaEvent_t event = nullptr;
    cuda::check_cuda(cudaEventCreate(&event), "stage times");
    events.emplace_back(event);
  }
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  cuda::check_cuda(cudaStreamIsCapturing(stream, &capturing), "stage times");
  const unsigned flags =
      capturing == cudaStreamCaptureStatusActive ? cudaEventRecordExternal : cudaEventRecordDefault;
  cuda::check_cuda(cudaEventRecordWithFlags(events[index].get(), stream, flags), "stage times");
}

void StageClock::start(cudaStream_t stream) {
  if (on_) record(2 * passes_[current_].stages.size(), stream);
}

void StageClock::end(Stage stage, cudaStream_t stream) {
  if (!on_) return;
  std::vector<Stage>& stages = passes_[current_].stages;
  record(2 * stages.size() + 1, stream);
  stages.push_back(stage);
}

void StageClock::add_to(StageTimes& times) const {
  if (!on_) return;
  const auto& [stages, events] = passes_[current_];
  for (size_t i = 0; i < stages.size(); ++i) {
    float milliseconds = 0;
    cuda::check_cuda(
        cudaEventElapsedTime(&milliseconds, events[2 * i].get(), events[2 * i + 1].get()),
        "stage times");
    times[stages[i]] += milliseconds / 1e3;
  }
}

}  // namespace replayssm
