// Times matrix products with weights of published models on a CUDA device, and the chain of small
// kernels that an MLP is at small batches (columns and arguments: op_benchmark.cuh). batch: rows.

#include <memory>

#include "op_benchmark.cuh"
#include "ops/cuda/dense.h"
#include "ops/cuda/device.h"
#include "ops/cuda/linear.h"
#include "ops/cuda/skinny.h"

namespace replayssm {
namespace {

constexpr DType kAct = DType::kBFloat16;

struct Library {
  explicit Library(cudaStream_t tuning) : stream(tuning) { runner.tune(true); }

  cuda::Stream own;
  cuda::DeviceMemory memory{own};
  cuda::LinearRunner runner{memory};
  cudaStream_t stream;
};

cuda::LinearParams product(Context& c, int64_t in, int64_t out) {
  return {.x = c.memory.random(c.batch * in, kAct),
          .x_head_stride = in,
          .weight = c.memory.random(in * out, kAct, 0.02f),
          .in_features = in,
          .out_features = out,
          .rows = c.batch,
          .dtype = kAct,
          .y = c.memory.random<float>(c.batch * out, DType::kFloat32),
          .y_head_stride = out};
}

Op single(const std::string& name, int64_t in, int64_t out, bool skinny) {
  return {name + (skinny ? ", few rows" : ", by time"),
          [=](Context& c) {
            Problem problem;
            problem.bytes = double(in * out * 2);
            const auto library = std::make_shared<Library>(nullptr);
            for (int64_t i = 0; i < std::min<int64_t>(c.layers(problem.bytes), 8); ++i) {
              const cuda::LinearParams p = product(c, in, out);
              if (!skinny) library->runner.run(p, nullptr);
              problem.layers.push_back([=](cudaStream_t stream) {
                skinny ? cuda::skinny_product(p, stream) : void(library->runner.run(p, stream));
              });
            }
            return problem;
          },
          skinny ? std::min(cuda::kMostSkinnyRows, 30000 / in) : INT64_MAX};
}

// Product and gate, product, norm.
Op mlp(const std::string& name, int64_t hidden, int64_t width, bool gated) {
  return {name, [=](Context& c) {
            Problem problem;
            const int64_t rows = c.batch, out = gated ? 2 * width : width;
            problem.bytes = double(hidden * (out + width) * 2);
            const auto library = std::make_shared<Library>(nullptr);
            cuda::AddNormParams norm;
            norm.hidden = {c.memory.random(rows * hidden, DType::kFloat32), hidden};
            norm.weight = c.memory.random<float>(hidden, DType::kFloat32);
            norm.rows = rows;
            norm.dim = hidden;
            for (int64_t i = 0; i < 8; ++i) {
              cuda::LinearParams up = product(c, hidden, out), down = product(c, width, hidden);
              up.activation =
                  gated ? cuda::LinearActivation::kSwiGlu : cuda::LinearActivation::kReluSquared;
              up.activated = const_cast<void*>(down.x);
              down.most_parts = cuda::kMostQuickParts;
              down.y = c.memory.random<float>(rows * hidden * down.most_parts, DType::kFloat32);
              norm.delta = {down.y, hidden, DType::kFloat32};
              norm.delta_part_stride = rows * hidden;
              norm.y = {const_cast<void*>(up.x), hidden, kAct};
              const auto run = [=](cudaStream_t stream) {
                if (!library->runner.run(up, stream).activated) {
                  const cuda::InRows x{up.y, out, DType::kFloat32};
                  const cuda::OutRows y{up.activated, width, kAct};
                  gated ? cuda::swiglu(x, 1, rows, width, y, stream)
                        : cuda::relu_squared(x, 1, rows, width, y, stream);
                }
                cuda::AddNormParams behind = norm;
                behind.delta_parts = library->runner.run(down, stream).parts;
                cuda::add_rms_norm(behind, stream);
              };
              run(nullptr);
              problem.layers.push_back(run);
            }
            return problem;
          }};
}

std::vector<Op> ops() {
  struct Shape {
    const char* name;
    int64_t in, out;
  };
  std::vector<Op> all;
  for (const Shape& s : {Shape{"nano-4b in_proj", 3136, 17504},
                         {"nano-4b out_proj", 7680, 3136},
                         {"nano-4b up", 3136, 12544},
                         {"nano-4b down", 12544, 3136},
                         {"nano-4b lm_head", 3136, 131072},
                         {"qwen-4b in_proj", 2560, 12352},
                         {"qwen-4b out_proj", 4096, 2560},
                         {"qwen-4b gate_up", 2560, 18432},
                         {"qwen-4b down", 9216, 2560}}) {
    for (const bool skinny : {true, false}) all.push_back(single(s.name, s.in, s.out, skinny));
  }
  all.push_back(mlp("nano-4b mlp", 3136, 12544, false));
  all.push_back(mlp("qwen-4b mlp", 2560, 9216, true));
  return all;
}

}  // namespace
}  // namespace replayssm

int main(int argc, char** argv) {
  return replayssm::run_main(replayssm::ops(), {1, 8, 32, 128, 256}, argc, argv);
}
