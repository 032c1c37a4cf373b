// What a program without a CUDA backend says.

#include "core/check.h"
#include "model/model.h"

namespace replayssm {

std::string cuda_obstacle() { return "this program is built without a CUDA backend"; }

Bandwidth cuda_bandwidth(int64_t) { fail("device cuda: ", cuda_obstacle()); }

std::string cuda_obstacle(const ModelConfig&) { return cuda_obstacle(); }

std::unique_ptr<Model> load_cuda_model(const ModelSource&, DType) {
  fail("device cuda: ", cuda_obstacle());
}

}  // namespace replayssm
