#include "ops/cuda/bandwidth.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "core/buffer.h"
#include "ops/cuda/check_cuda.h"
#include "ops/cuda/device.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 512, kLoads = 4, kRepeats = 7;

// A thread takes kLoads words of 16 bytes at a time, a grid apart.
template <class Fn>
__device__ inline void for_words(uint4* data, int64_t words, Fn&& fn) {
  const int64_t grid = int64_t{gridDim.x} * kThreads;
  int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i + (kLoads - 1) * grid < words; i += kLoads * grid) fn(data + i, grid);
}

__global__ void __launch_bounds__(kThreads)
    read_kernel(uint4* data, int64_t words, unsigned* sink) {
  unsigned sum = 0;
  for_words(data, words, [&](const uint4* at, int64_t grid) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) loaded[i] = __ldcs(at + i * grid);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum += loaded[i].x ^ loaded[i].y ^ loaded[i].z ^ loaded[i].w;
  });
  if (sum == 1) *sink = sum;  // keeps the loads alive
}

__global__ void __launch_bounds__(kThreads) rewrite_kernel(uint4* data, int64_t words) {
  for_words(data, words, [&](uint4* at, int64_t grid) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) loaded[i] = __ldcs(at + i * grid);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      loaded[i].x += 1;
      __stcs(at + i * grid, loaded[i]);
    }
  });
}

__global__ void __launch_bounds__(kThreads) write_kernel(uint4* data, int64_t words) {
  for_words(data, words, [&](uint4* at, int64_t grid) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) __stcs(at + i * grid, make_uint4(0, 0, 0, 0));
  });
}

// Seconds of the median launch.
template <class Launch>
double median_seconds(const Stream& stream, Launch&& launch) {
  std::array<cudaEvent_t, kRepeats + 1> events{};
  for (cudaEvent_t& event : events) check_cuda(cudaEventCreate(&event), "bandwidth");
  launch();
  for (int i = 0; i <= kRepeats; ++i) {
    check_cuda(cudaEventRecord(events[i], stream.get()), "bandwidth");
    if (i < kRepeats) launch();
  }
  stream.synchronize();
  std::array<float, kRepeats> times{};
  for (int i = 0; i < kRepeats; ++i)
    check_cuda(cudaEventElapsedTime(&times[i], events[i], events[i + 1]), "bandwidth");
  for (const cudaEvent_t event : events) cudaEventDestroy(event);
  std::ranges::sort(times);
  return times[kRepeats / 2] / 1e3;
}

}  // namespace

Bandwidth measure_bandwidth(int64_t bytes) {
  const Stream stream;
  DeviceMemory memory(stream);
  const Buffer buffer(bytes, memory), sink(sizeof(unsigned), memory);
  auto* data = buffer.as<uint4>();
  const int64_t words = bytes / static_cast<int64_t>(sizeof(uint4));
  int device = 0, processors = 0;
  check_cuda(cudaGetDevice(&device), "bandwidth");
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
             "bandwidth");
  const auto blocks = static_cast<unsigned>(processors * 4);
  const auto size = static_cast<double>(bytes);
  Bandwidth result;
  result.write = size / median_seconds(stream, [&] {
                   write_kernel<<<blocks, kThreads, 0, stream.get()>>>(data, words);
                 });
  result.read_modify_write = 2 * size / median_seconds(stream, [&] {
                               rewrite_kernel<<<blocks, kThreads, 0, stream.get()>>>(data, words);
                             });
  result.read =
      size / median_seconds(stream, [&] {
        read_kernel<<<blocks, kThreads, 0, stream.get()>>>(data, words, sink.as<unsigned>());
      });
  check_cuda(cudaGetLastError(), "bandwidth");
  return result;
}

}  // namespace replayssm::cuda
