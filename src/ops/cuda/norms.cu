// Gated RMS norms. A group belongs to a team of threads, a power of two that depends on group_dim
// alone: a part of a warp, or a block. Its values stay in registers between the sum of squares and
// the scaling; weights are read while the kernel before still runs.

#include "ops/cuda/norms.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "ops/cuda/activations.cuh"
#include "ops/cuda/block_reduce.cuh"
#include "ops/cuda/check_rows.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fast_divide.h"

namespace replayssm::cuda {
namespace {

constexpr int kMinThreads = 128, kMaxThreads = 1024;

// The sum over a team, in each of its threads. A team of more than a warp is a block.
__device__ inline float team_sum(float x, int team, float* shared) {
  return team <= 32 ? warp_sum(x, team) : block_sum(x, shared);
}

// X: void where types are known at run time only.
template <class X, int kVec>
__device__ inline void load(const void* data, DType dtype, int64_t index, float (&x)[kVec]) {
  if constexpr (std::is_void_v<X>) {
    load_run<kVec>(data, dtype, index, x);
  } else {
    load_run<X, kVec>(static_cast<const X*>(data) + index, x);
  }
}

// A thread has kChunks runs of kVec consecutive channels, those of a team side by side. X: the type
// of x and gate.
template <class X, int kVec, int kChunks>
__global__ void __launch_bounds__(kMaxThreads)
    gated_rms_norm_kernel(const __grid_constant__ GatedNormParams p, int team_log,
                          FastDivide groups) {
  release_successor();
  __shared__ float shared[kMaxThreads / 32];
  const int team = 1 << team_log, member = static_cast<int>(threadIdx.x) & (team - 1);
  const int64_t group = blockIdx.x * (blockDim.x >> team_log) + (threadIdx.x >> team_log);
  bool exists = group < p.rows * p.groups;
  const int64_t row = groups.divide(static_cast<uint32_t>(group)),
                channel = (group - row * p.groups) * p.group_dim;
  if (p.first_row) exists = exists && *p.first_row <= row && row < *p.end_row;
  const auto at = [&](int c) { return (c * team + member) * kVec; };
  const auto active = [&](int c) { return exists && at(c) < p.group_dim; };
  float x[kChunks][kVec], act[kChunks][kVec], weight[kChunks][kVec];
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    if (p.weight && active(c))
      load_constants<kVec>(p.weight + (p.weight_per_group ? 0 : channel) + at(c), weight[c]);
  wait_for_predecessor();
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (!active(c)) continue;
    load<X>(p.x, p.x_dtype, group * p.group_dim + at(c), x[c]);
    load<X>(p.gate, p.gate_dtype, row * p.gate_stride + channel + at(c), act[c]);
  }
  float sum = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (!active(c)) continue;
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const float z = act[c][e];
      act[c][e] = p.activation == GateActivation::kSilu ? silu(z) : sigmoid(z);
      if (x[c][e] == 0) act[c][e] = 0;  // rows of padding are zeros and have gates of any kind
      if (p.gate_first) x[c][e] *= act[c][e];
      sum = fmaf(x[c][e], x[c][e], sum);
    }
  }
  const float mean =
      __fdividef(team_sum(sum, team, shared), static_cast<float>(static_cast<int>(p.group_dim)));
  const float scale = rsqrtf(mean + p.eps);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (!active(c)) continue;
    float y[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      y[e] = p.weight ? x[c][e] * scale * weight[c][e] : x[c][e];
      if (!p.gate_first) y[e] *= act[c][e];
    }
    store_run<kVec>(p.y, p.y_dtype, group * p.group_dim + at(c), y);
  }
}

template <class X, int kVec, int kChunks>
void launch_norm(const GatedNormParams& p, cudaStream_t stream) {
  const auto runs = static_cast<uint64_t>((p.group_dim + kVec - 1) / kVec);
  const int team = static_cast<int>(std::min<uint64_t>(std::bit_ceil(runs), kMaxThreads));
  const int threads = team > 32 ? team : kMinThreads;
  const int64_t teams = threads / team, blocks = (p.rows * p.groups + teams - 1) / teams;
  if (p.rows * p.groups > INT32_MAX)
    fail("rows: expected fewer, got ", p.rows, " of ", p.groups, " groups");
  launch_dependent("gated_rms_norm", gated_rms_norm_kernel<X, kVec, kChunks>,
                   dim3(static_cast<unsigned>(blocks)), threads, 0, stream, p,
                   std::countr_zero(static_cast<unsigned>(team)),
                   FastDivide(static_cast<uint32_t>(p.groups)));
}

void check_norm(const GatedNormParams& p) {
  if (p.rows < 0) fail("rows: expected at least 0, got ", p.rows);
  if (p.groups < 1) fail("groups: expected at least 1, got ", p.groups);
  if (p.group_dim < 1 || p.group_dim > kMaxGroupDim)
    fail("group_dim: expected 1 to ", kMaxGroupDim, ", got ", p.group_dim);
  if (p.gate_stride < p.groups * p.group_dim) {
    fail("gate_stride: expected at least ", p.groups * p.group_dim, ", got ", p.gate_stride);
  }
  check_float("x_dtype", p.x_dtype);
  check_float("gate_dtype", p.gate_dtype);
  check_float("y_dtype", p.y_dtype);
  if (p.rows == 0) return;
  check_pointer("x", p.x, dtype_bytes(p.x_dtype));
  check_pointer("gate", p.gate, dtype_bytes(p.gate_dtype));
  check_pointer("y", p.y, dtype_bytes(p.y_dtype));
  if (p.weight != nullptr) check_pointer("weight", p.weight, sizeof(float));
}

}  // namespace

void gated_rms_norm(const GatedNormParams& p, cudaStream_t stream) {
  check_norm(p);
  if (p.rows == 0) return;
  constexpr int kVec = 8;
  const bool vectors = p.group_dim % kVec == 0 && rows_aligned(p.x) && rows_aligned(p.y) &&
                       rows_aligned(p.gate, p.gate_stride * dtype_bytes(p.gate_dtype)) &&
                       rows_aligned(p.weight);
  if (!vectors) return launch_norm<void, 1, kMaxGroupDim / kMaxThreads>(p, stream);
  constexpr int kChunks = kMaxGroupDim / kVec / kMaxThreads;
  if (p.x_dtype == DType::kFloat32 && p.gate_dtype == DType::kFloat32)
    return launch_norm<float, kVec, kChunks>(p, stream);
  launch_norm<void, kVec, kChunks>(p, stream);
}

}  // namespace replayssm::cuda
