// Matrix products of very few rows.
//
// A block computes kOut outputs of all rows: its threads share the columns, eight at a time, and
// what each has summed up is added across the block at the end. The first words of the weight are
// under way before the kernel in front has ended.

#include "ops/cuda/skinny.h"

#include "core/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/elements.cuh"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kOut = 4, kVector = 8;

struct SkinnyCall {
  const void* x;
  int64_t x_stride;  // in vectors
  const void* weight;
  const float* bias;
  float* y;
  int64_t y_stride;
  int vectors;  // of a row
  int out;
};

template <class T>
__device__ inline void widen_vector(const uint4& word, float (&x)[kVector]) {
  widen<T>(word.x, x);
  widen<T>(word.y, x + 2);
  widen<T>(word.z, x + 4);
  widen<T>(word.w, x + 6);
}

// The words of kOut rows of the weight at one place; rows beyond the last repeat it.
struct WeightWords {
  uint4 word[kOut];

  __device__ void load(const SkinnyCall& p, int first, int at) {
    const auto* weight = static_cast<const uint4*>(p.weight);
#pragma unroll
    for (int o = 0; o < kOut; ++o)
      word[o] = __ldcs(weight + int64_t{min(first + o, p.out - 1)} * p.vectors + at);
  }
};

template <class T, int kRows>
__device__ inline void accumulate(const SkinnyCall& p, const WeightWords& weight, int at,
                                  float (&sum)[kOut][kRows]) {
  float x[kRows][kVector];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    widen_vector<T>(static_cast<const uint4*>(p.x)[r * p.x_stride + at], x[r]);
#pragma unroll
  for (int o = 0; o < kOut; ++o) {
    float w[kVector];
    widen_vector<T>(weight.word[o], w);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[o][r] += w[i] * x[r][i];
    }
  }
}

template <int kRows>
__device__ inline void store(const SkinnyCall& p, int first, float (&sum)[kOut][kRows]) {
  __shared__ float partial[kWarps][kOut * kRows];
#pragma unroll
  for (int o = 0; o < kOut; ++o) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      for (int d = 16; d > 0; d /= 2) sum[o][r] += __shfl_xor_sync(~0u, sum[o][r], d);
      if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32][o * kRows + r] = sum[o][r];
    }
  }
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x), o = i / kRows, r = i % kRows;
  if (i >= kOut * kRows || first + o >= p.out) return;
  float total = 0;
  for (int w = 0; w < kWarps; ++w) total += partial[w][i];
  p.y[r * p.y_stride + first + o] = total + (p.bias ? p.bias[first + o] : 0);
}

template <class T, int kRows>
__global__ void __launch_bounds__(kThreads) skinny_kernel(const __grid_constant__ SkinnyCall p) {
  release_successor();
  const int first = static_cast<int>(blockIdx.x) * kOut;
  int at = static_cast<int>(threadIdx.x);
  WeightWords weight;
  if (at < p.vectors) weight.load(p, first, at);
  wait_for_predecessor();
  float sum[kOut][kRows] = {};
  while (at < p.vectors) {
    WeightWords next = weight;
    if (at + kThreads < p.vectors) next.load(p, first, at + kThreads);
    accumulate<T, kRows>(p, weight, at, sum);
    weight = next;
    at += kThreads;
  }
  store<kRows>(p, first, sum);
}

template <class T>
void launch(const SkinnyCall& call, int64_t rows, cudaStream_t stream) {
  const auto run = [&](void (*kernel)(SkinnyCall)) {
    launch_dependent("skinny_product", kernel,
                     dim3(static_cast<unsigned>((call.out + kOut - 1) / kOut)), kThreads, 0, stream,
                     call);
  };
  switch (rows) {
    case 1: return run(skinny_kernel<T, 1>);
    case 2: return run(skinny_kernel<T, 2>);
    case 3: return run(skinny_kernel<T, 3>);
    case 4: return run(skinny_kernel<T, 4>);
    default: fail("skinny_product: expected at most ", kMostSkinnyRows, " rows, got ", rows);
  }
}

}  // namespace

bool is_skinny(const LinearParams& p) {
  const int64_t element = dtype_bytes(p.dtype);
  return p.heads == 1 && p.rows <= kMostSkinnyRows && element == 2 && p.in_features > 0 &&
         rows_aligned(p.x, p.x_head_stride * element) &&
         rows_aligned(p.weight, p.in_features * element) && p.in_features < (1 << 28) &&
         p.out_features < (1 << 28);
}

void skinny_product(const LinearParams& p, cudaStream_t stream) {
  REPLAYSSM_CHECK(is_skinny(p), "heads=", p.heads, " rows=", p.rows, " in=", p.in_features);
  if (p.rows == 0 || p.out_features == 0) return;
  const SkinnyCall call{.x = p.x,
                        .x_stride = p.x_head_stride / kVector,
                        .weight = p.weight,
                        .bias = p.bias,
                        .y = p.y,
                        .y_stride = p.y_head_stride,
                        .vectors = static_cast<int>(p.in_features / kVector),
                        .out = static_cast<int>(p.out_features)};
  if (p.dtype == DType::kBFloat16) return launch<Bf16>(call, p.rows, stream);
  launch<Fp16>(call, p.rows, stream);
}

}  // namespace replayssm::cuda
