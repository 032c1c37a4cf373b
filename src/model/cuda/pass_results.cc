#include "model/cuda/pass_results.h"

#include <algorithm>

#include "core/check.h"
#include "ops/cuda/check_cuda.h"

namespace replayssm {

void PassResults::enqueue(const int32_t* tokens, int64_t rows, int32_t* to, cudaStream_t stream) {
  REPLAYSSM_CHECK(passes_ < kMostPasses, "passes=", passes_);
  Result& result = results_[(first_ + passes_) % kMostPasses];
  if (!result.ended) {
    cudaEvent_t event = nullptr;
    cuda::check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "tokens");
    result.ended.reset(event);
  }
  result.rows = rows;
  result.to = to;
  if (rows > 0) {
    cuda::check_cuda(
        cudaMemcpyAsync(result.tokens.get(rows), tokens, static_cast<size_t>(rows) * sizeof *tokens,
                        cudaMemcpyDeviceToHost, stream),
        "tokens");
  }
  cuda::check_cuda(cudaEventRecord(result.ended.get(), stream), "tokens");
  ++passes_;
}

void PassResults::finish() {
  REPLAYSSM_CHECK(passes_ > 0, "no pass");
  Result& result = results_[first_];
  first_ = (first_ + 1) % kMostPasses;
  --passes_;
  cuda::check_cuda(cudaEventSynchronize(result.ended.get()), "tokens");
  if (result.rows > 0) std::copy_n(result.tokens.get(0), result.rows, result.to);
}

}  // namespace replayssm
