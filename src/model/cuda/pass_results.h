// Tokens on their way from the device: of a pass that runs, and of those behind it.
#pragma once

#include <list>

#include "model/cuda/event.h"
#include "model/layers.h"
#include "ops/cuda/device.h"

namespace replayssm {

class PassResults {
 public:
  // Enqueues the copy of a pass's tokens, which finish() hands to `to`.
  void enqueue(const int32_t* tokens, int64_t rows, int32_t* to, cudaStream_t stream);
  // Waits for the oldest pass.
  void finish();
  bool empty() const { return under_way_.empty(); }

 private:
  struct Result {
    explicit Result(Memory& memory) : tokens(memory) {}

    Scratch<int32_t> tokens;
    Event ended;
    int64_t rows = 0;
    int32_t* to = nullptr;
  };

  cuda::PinnedMemory pinned_;
  std::list<Result> under_way_, spare_;  // the oldest first
};

}  // namespace replayssm
