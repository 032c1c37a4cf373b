// In place of linear_onednn.cc in a build without oneDNN.
#include "ops/cpu/linear_slice.h"

namespace replayssm::cpu {

std::unique_ptr<MatrixSlice> make_onednn_slice(const SliceSource&, ThreadPool&, int) {
  return nullptr;
}

}  // namespace replayssm::cpu
