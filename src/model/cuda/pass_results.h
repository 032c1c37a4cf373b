// Tokens on their way from the device: of a pass that runs, and of the one behind it.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <memory>

#include "model/layers.h"
#include "ops/cuda/device.h"

namespace replayssm {

class PassResults {
 public:
  static constexpr int64_t kMostPasses = 2;

  // Enqueues the copy of a pass's tokens, which finish() hands to `to`.
  void enqueue(const int32_t* tokens, int64_t rows, int32_t* to, cudaStream_t stream);
  // Waits for the oldest pass.
  void finish();
  int64_t passes() const { return passes_; }

 private:
  struct Destroy {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  struct Result {
    explicit Result(Memory& memory) : tokens(memory) {}

    Scratch<int32_t> tokens;
    std::unique_ptr<CUevent_st, Destroy> ended;
    int64_t rows = 0;
    int32_t* to = nullptr;
  };

  cuda::PinnedMemory pinned_;
  std::array<Result, kMostPasses> results_{Result(pinned_), Result(pinned_)};
  int64_t first_ = 0, passes_ = 0;
};

}  // namespace replayssm
