// The rows of states that a warp fetches, and those of outputs that it stores.
#pragma once

#include "ops/cuda/step_block.cuh"
#include "ops/cuda/step_mma.cuh"

namespace replayssm::cuda {

// Which words of kPassRows rows of type S a lane uses: with the lanes of `update` (eight a row), or
// with those of MmaTarget (four a row).
template <class S, int kState, bool kMma>
struct Pass {
  using Map = RowMap<S, kState>;
  using Target = MmaTarget<std::conditional_t<kMma, S, Bf16>, kState>;
  static constexpr int kPassWords = kPassRows * kState * int(sizeof(S)) / (32 * 16);
  static constexpr int kPasses = kWords / kPassWords;  // of a group
  static_assert(kPassWords > 0 && kPasses > 0);

  // Fetches passes [0, passes) of the rows from `rows` on.
  __device__ static void fetch(const S* rows, int passes, char* target) {
    const int lane = threadIdx.x % kRowLanes, group = threadIdx.x % 32 / kRowLanes;
    if constexpr (kMma) {
      rows += Target::row() * kState + Target::element(0);
    } else {
      rows += group * kState + Map::element(0, lane);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int pass = i / kPassWords, n = i % kPassWords;
      int offset = pass * kPassRows * kState;
      if constexpr (kMma) {
        offset += n * 4 * Target::kElems;
      } else {
        offset += n / Map::kChunks * (32 / kRowLanes) * kState +
                  n % Map::kChunks * kRowLanes * Map::kElems;
      }
      if (pass < passes) copy_async_16(target + i * 32 * 16, rows + offset);
    }
  }
};

// Outputs [begin, end) of the block's columns, from shared memory; null: zeros.
template <class Act>
__device__ void store_outputs(const RecurrentStepParams& p, const StepLaunch& launch,
                              const BlockPlace& b, int token, const float* outputs, int begin,
                              int end) {
  const int64_t base =
      (static_cast<int64_t>(token) * launch.heads + b.head) * launch.head_dim + b.row;
  for (int column = begin + threadIdx.x % 32; column < end; column += 32) {
    float o = outputs ? outputs[column] : 0.0f;
    if (p.z && outputs) {
      const float z = to_float(static_cast<const Act*>(
          p.z)[token * p.z_stride + b.head * launch.head_dim + b.row + column]);
      o *= z / (1.0f + expf(-z));
    }
    switch (p.o_dtype) {
      case DType::kBFloat16: static_cast<Bf16*>(p.o)[base + column] = from_float<Bf16>(o); break;
      case DType::kFloat16: static_cast<Fp16*>(p.o)[base + column] = from_float<Fp16>(o); break;
      default: static_cast<float*>(p.o)[base + column] = o;
    }
  }
}

}  // namespace replayssm::cuda
