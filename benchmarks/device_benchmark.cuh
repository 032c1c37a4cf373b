// What the device benchmarks share: random device memory, times of captured graphs, the ceiling.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/cuda/check_cuda.h"
#include "replayssm/types.h"

namespace replayssm {

inline void check(cudaError_t status) { cuda::check_cuda(status, "benchmark"); }

static __global__ void fill_normal(void* data, int64_t count, DType dtype, float scale,
                                   float offset) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    uint64_t x = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u + 0x1234567u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    const float value =
        offset + scale * (static_cast<float>(static_cast<uint32_t>(x >> 33)) * 0x1p-30f - 1.0f);
    switch (dtype) {
      case DType::kFloat32: static_cast<float*>(data)[i] = value; break;
      case DType::kFloat16: static_cast<__half*>(data)[i] = __float2half(value); break;
      case DType::kBFloat16: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(value); break;
      default: static_cast<uint8_t*>(data)[i] = (x >> 20) & 0xbf;  // finite as fp8
    }
  }
}

// Device memory that is freed with the problem it belongs to.
class BenchmarkMemory {
 public:
  ~BenchmarkMemory() {
    for (void* block : blocks_) cudaFree(block);
  }
  template <class T>
  T* take(int64_t bytes) {
    void* block = nullptr;
    check(cudaMalloc(&block, std::max<int64_t>(bytes, 16)));
    blocks_.push_back(block);
    return static_cast<T*>(block);
  }
  template <class T = void>
  T* random(int64_t count, DType dtype, float scale = 1, float offset = 0) {
    T* data = take<T>(count * dtype_bytes(dtype));
    fill_normal<<<2048, 256>>>(data, count, dtype, scale, offset);
    return data;
  }
  template <class T>
  T* upload(const std::vector<T>& values) {
    T* data = take<T>(std::ssize(values) * sizeof(T));
    check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return data;
  }

 private:
  std::vector<void*> blocks_;
};

inline float milliseconds(cudaGraphExec_t graph, cudaStream_t stream) {
  static cudaEvent_t begin = nullptr, end = nullptr;
  if (!begin) {
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
  }
  check(cudaEventRecord(begin, stream));
  check(cudaGraphLaunch(graph, stream));
  check(cudaEventRecord(end, stream));
  check(cudaEventSynchronize(end));
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end));
  return ms;
}

inline double median(std::vector<float> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// Medians of several graphs launched in turn.
inline std::vector<double> interleaved(const std::vector<cudaGraphExec_t>& graphs,
                                       cudaStream_t stream, int repeats) {
  std::vector<std::vector<float>> times(graphs.size());
  for (int i = -2; i < repeats; ++i) {
    for (size_t g = 0; g < graphs.size(); ++g) {
      const float ms = milliseconds(graphs[g], stream);
      if (i >= 0) times[g].push_back(ms);
    }
  }
  std::vector<double> result;
  for (const auto& t : times) result.push_back(median(t));
  return result;
}

static __global__ void __launch_bounds__(256)
    read_all(const uint4* data, int64_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t stride = int64_t{gridDim.x} * 256;
  int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  for (; i + 7 * stride < count; i += 8 * stride) {
    uint4 x[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) x[u] = __ldcs(data + i + u * stride);
#pragma unroll
    for (int u = 0; u < 8; ++u) sum ^= x[u].x ^ x[u].y ^ x[u].z ^ x[u].w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

// Bytes per second of a pure read.
inline double read_bandwidth(cudaStream_t stream) {
  BenchmarkMemory memory;
  const int64_t bytes = int64_t{4} << 30;
  const auto* data = memory.random<uint4>(bytes / 4, DType::kFloat32);
  auto* sink = memory.take<uint32_t>(4);
  cudaGraph_t captured;
  cudaGraphExec_t graph;
  double best = 0;
  for (const int blocks : {132 * 8, 132 * 16, 132 * 32}) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    read_all<<<blocks, 256, 0, stream>>>(data, bytes / 16, sink);
    check(cudaStreamEndCapture(stream, &captured));
    check(cudaGraphInstantiate(&graph, captured, 0));
    best = std::max(best, bytes / (interleaved({graph}, stream, 9)[0] * 1e-3));
    check(cudaGraphExecDestroy(graph));
    check(cudaGraphDestroy(captured));
  }
  return best;
}

}  // namespace replayssm
