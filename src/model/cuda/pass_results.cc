#include "model/cuda/pass_results.h"

#include <algorithm>

#include "core/check.h"

namespace replayssm {

void PassResults::enqueue(const int32_t* tokens, int64_t rows, int32_t* to, cudaStream_t stream) {
  if (spare_.empty()) spare_.emplace_back(pinned_);
  Result& result = spare_.front();
  result.rows = rows;
  result.to = to;
  if (rows > 0) {
    cuda::check_cuda(
        cudaMemcpyAsync(result.tokens.get(rows), tokens, static_cast<size_t>(rows) * sizeof *tokens,
                        cudaMemcpyDeviceToHost, stream),
        "tokens");
  }
  result.ended.record(stream);
  under_way_.splice(under_way_.end(), spare_, spare_.begin());
}

void PassResults::finish() {
  REPLAYSSM_CHECK(!under_way_.empty(), "no pass");
  Result& result = under_way_.front();
  spare_.splice(spare_.begin(), under_way_, under_way_.begin());
  result.ended.wait();
  if (result.rows > 0) std::copy_n(result.tokens.get(0), result.rows, result.to);
}

}  // namespace replayssm
