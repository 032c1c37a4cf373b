// What all parts of a block's preparation share: where it stands, and how rows reach a token.
#pragma once

#include "ops/cuda/block_reduce.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/step_block.cuh"

namespace replayssm::cuda {

// A warp's passes among those of the block.
struct Passes {
  int begin, end;
};

// kMany: windows may have more than one token.
template <Family kOf, class Act, int kState, bool kMany>
struct StepContext {
  using Element = Act;
  static constexpr bool kManyTokens = kMany;
  static constexpr Family kFamily = kOf;
  static constexpr bool kOperands = are_operands(device_dtype<Act>());
  using Shared = BlockShared<kFamily, Act, kState>;

  const RecurrentStepParams& p;
  const StepLaunch& launch;
  const BlockPlace& b;
  const Shared& shared;

  __device__ int warp() const { return threadIdx.x / 32; }
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int warps() const { return launch.config.warps; }
  __device__ int window() const { return kMany ? b.window : 1; }

  // How many warps for_tokens would keep busy, had the block as many.
  __device__ int token_warps(int together) const {
    return launch.config.heads * ((window() + together - 1) / together);
  }
  // Calls fn(head, i), a warp for each head and kTogether tokens from i on: what each token waits
  // for, the others fill.
  template <int kTogether, class Fn>
  __device__ void for_tokens(Fn&& fn) const {
    const int groups = kMany ? (b.window + kTogether - 1) / kTogether : b.window;
#pragma unroll 1
    for (int n = warp(); n < launch.config.heads * groups; n += warps()) {
      const int head = kMany ? n / groups : n;
      fn(head, kMany ? (n - head * groups) * kTogether : 0);
    }
  }
  // Calls fn(head, begin, end) with a warp's passes, head by head.
  template <class Fn>
  __device__ void for_heads(const Passes& passes, Fn&& fn) const {
    int head = launch.passes.divide(passes.begin);
#pragma unroll 1
    for (int pass = passes.begin; pass < passes.end; ++head) {
      const int stop = min(passes.end, (head + 1) * launch.head_passes);
      fn(head, pass, stop);
      pass = stop;
    }
  }
  // Token u of a group: the last one stands for those behind the window.
  __device__ int together(int first, int u) const {
    return kMany ? min(first + u, b.window - 1) : 0;
  }

  // Token i and its ancestors in the window, a bit each.
  __device__ uint32_t path(int i) const {
    if constexpr (!kMany) return 1;
    if (!p.batch.parent) return (2u << i) - 1;
    uint32_t mask = 0;
    while (i >= 0) {
      mask |= 1u << i;
      const int parent = p.batch.parent[b.token + i];
      i = parent < i ? parent : -1;  // a wrong one ends the path
    }
    return mask;
  }
  // Whether row j is mixed into the output of a token with this path.
  __device__ bool on_path(uint32_t path, int j) const {
    if (j < b.first_mixed() || j >= b.rows) return false;
    return j < b.history || (path >> (j - b.history) & 1) != 0;
  }

  // Of a token's path in the window: the log decay of what is newer than row j, and of all of it.
  // In the order of the path alone, whatever lies between its rows.
  __device__ float newer_in_window(int head, uint32_t path, int j, float& all) const {
    float newer = 0;
    all = 0;
#pragma unroll 1
    for (int node = window() - 1; node >= 0; --node) {
      if ((path >> node & 1) == 0) continue;
      if (node == j - b.history) newer = all;
      all += shared.log_decays(head)[b.history + node];
    }
    return newer;
  }
  // Mamba-2's D of a head.
  __device__ float skip(int head) const { return p.skip ? __ldg(p.skip + b.head + head) : 0.0f; }

  // The value of row j adds c v_j to the output of token i, its own value `skip` times besides.
  // From b.rows to the next multiple of 16 there must be zeros.
  __device__ void store_weight(int head, int i, int j, float c, float skip) const {
    if (j == b.history + i) c += skip;
    if constexpr (kOperands) {
      store_operand_parts(shared.weights(0, head, i) + j, launch.layout.weight_stride, c);
    } else {
      shared.plain_weights(head, i)[j] = c;
    }
  }
  // stride: from the operands of one token to those of the next.
  __device__ void store_operand_parts(Bf16* to, int stride, float x) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const Bf16 y = from_float<Bf16>(x);
      to[part * launch.layout.tokens * stride] = y;
      x -= to_float(y);
    }
  }
};

// Of the lanes' values, the sum of those in the lanes above each, and behind all of them `carried`,
// which grows by all.
__device__ inline float sum_above(float x, float& carried) {
  const int lane = threadIdx.x % 32;
  float sum = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float above = __shfl_down_sync(kAllLanes, sum, d);
    if (lane + d < 32) sum += above;
  }
  const float above = __shfl_down_sync(kAllLanes, sum, 1), before = carried;
  carried += __shfl_sync(kAllLanes, sum, 0);
  return before + (lane < 31 ? above : 0.0f);
}

}  // namespace replayssm::cuda
