#include "ops/cuda/random_weights.h"

#include "core/check.h"
#include "core/random_weight.h"
#include "ops/cuda/check_cuda.h"
#include "ops/cuda/elements.cuh"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 256;

// A thread has the weights of the same bits.
template <class T>
__global__ void __launch_bounds__(kThreads)
    random_weights_kernel(T* to, uint64_t first, int64_t count) {
  const uint64_t four = first / 4 + uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint64_t bits = random_weight_bits(four);
  for (int e = 0; e < 4; ++e) {
    const auto i = static_cast<int64_t>(4 * four + e - first);
    if (i < 0 || i >= count) continue;
    to[i] = from_float<T>(to_float(from_float<Bf16>(random_weight(random_weight_part(bits, e)))));
  }
}

}  // namespace

void write_random_weights(void* to, DType dtype, uint64_t first, int64_t count,
                          cudaStream_t stream) {
  if (count == 0) return;
  const uint64_t fours = (first % 4 + static_cast<uint64_t>(count) + 3) / 4;
  const auto blocks = static_cast<unsigned>((fours + kThreads - 1) / kThreads);
  const auto launch = [&]<class T>() {
    random_weights_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<T*>(to), first, count);
  };
  switch (dtype) {
    case DType::kFloat16: launch.template operator()<Fp16>(); break;
    case DType::kBFloat16: launch.template operator()<Bf16>(); break;
    default: launch.template operator()<float>();
  }
  check_cuda(cudaGetLastError(), "random weights");
}

}  // namespace replayssm::cuda
