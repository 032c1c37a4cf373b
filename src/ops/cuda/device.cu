#include "ops/cuda/device.h"

#include <cuda_runtime.h>

#include <climits>
#include <cstring>

#include "core/check.h"
#include "ops/cuda/check_cuda.h"
#include "ops/cuda/random_weights.h"

namespace replayssm::cuda {
namespace {

// Compiled like all kernels: where it has no machine code, none has.
__global__ void probe_kernel() {}

std::string capability_of(int device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return concat(major, ".", minor);
}

}  // namespace

std::string device_obstacle() {
  int driver = 0, devices = 0, device = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
    return "this machine has no NVIDIA driver";
  const cudaError_t counted = cudaGetDeviceCount(&devices);
  if (counted == cudaErrorInsufficientDriver) {
    return concat("the NVIDIA driver is for CUDA ", driver / 1000, ".", driver % 1000 / 10,
                  ", this program needs one for CUDA ", CUDART_VERSION / 1000, ".",
                  CUDART_VERSION % 1000 / 10);
  }
  if (counted == cudaErrorNoDevice || (counted == cudaSuccess && devices == 0))
    return "this machine has no CUDA device";
  if (counted != cudaSuccess) return concat("the CUDA devices: ", cudaGetErrorString(counted));
  cudaFuncAttributes attributes{};
  const cudaError_t found = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (found == cudaSuccess) return {};
  cudaGetLastError();  // what was found out must not fail a later call
  if (found != cudaErrorNoKernelImageForDevice && found != cudaErrorInvalidDeviceFunction)
    return concat("the CUDA device: ", cudaGetErrorString(found));
  cudaGetDevice(&device);
  return concat("the device's compute capability is ", capability_of(device),
                ", this program is built for another one");
}

Stream::Stream() {
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
}

Stream::~Stream() { cudaStreamDestroy(stream_); }

void Stream::synchronize() const { check_cuda(cudaStreamSynchronize(stream_), "the device"); }

void* DeviceMemory::allocate(int64_t bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, static_cast<size_t>(bytes));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail("out of device memory: ", bytes, " bytes refused, ", capacity().free, " of ",
         capacity().total, " are free");
  }
  check_cuda(status, "device memory");
  check_cuda(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), stream_.get()), "device memory");
  return data;
}

void DeviceMemory::release(void* data, int64_t /*bytes*/) noexcept {
  ++releases_;
  cudaFree(data);
}

void DeviceMemory::zero(void* first, int64_t bytes, int64_t stride, int64_t count) {
  if (bytes == 0 || count == 0) return;
  if (count > 1 && stride <= INT_MAX) {
    check_cuda(cudaMemset2DAsync(first, static_cast<size_t>(stride), 0, static_cast<size_t>(bytes),
                                 static_cast<size_t>(count), stream_.get()),
               "zeroing device memory");
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    check_cuda(cudaMemsetAsync(static_cast<char*>(first) + i * stride, 0,
                               static_cast<size_t>(bytes), stream_.get()),
               "zeroing device memory");
  }
}

void DeviceMemory::write(void* to, const void* host, int64_t bytes) {
  check_cuda(
      cudaMemcpyAsync(to, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_.get()),
      "writing device memory");
}

void DeviceMemory::write_random(void* to, DType dtype, uint64_t first, int64_t count) {
  write_random_weights(to, dtype, first, count, stream_.get());
}

void DeviceMemory::read(void* host, const void* from, int64_t bytes) {
  check_cuda(cudaMemcpyAsync(host, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost,
                             stream_.get()),
             "reading device memory");
  stream_.synchronize();
}

void DeviceMemory::copy(void* to, int64_t to_stride, const void* from, int64_t from_stride,
                        int64_t bytes, int64_t count) {
  if (bytes == 0 || count == 0) return;
  const bool strided = count > 1 && to_stride <= INT_MAX && from_stride <= INT_MAX;
  if (strided) {
    check_cuda(
        cudaMemcpy2DAsync(to, static_cast<size_t>(to_stride), from,
                          static_cast<size_t>(from_stride), static_cast<size_t>(bytes),
                          static_cast<size_t>(count), cudaMemcpyDeviceToDevice, stream_.get()),
        "copying device memory");
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    check_cuda(cudaMemcpyAsync(static_cast<char*>(to) + i * to_stride,
                               static_cast<const char*>(from) + i * from_stride,
                               static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream_.get()),
               "copying device memory");
  }
}

MemoryCapacity DeviceMemory::capacity() const {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "device memory");
  return {.total = static_cast<int64_t>(total), .free = static_cast<int64_t>(free)};
}

void* PinnedMemory::allocate(int64_t bytes) {
  void* data = nullptr;
  check_cuda(cudaMallocHost(&data, static_cast<size_t>(bytes)), "pinned memory");
  std::memset(data, 0, static_cast<size_t>(bytes));
  return data;
}

void PinnedMemory::release(void* data, int64_t /*bytes*/) noexcept { cudaFreeHost(data); }

}  // namespace replayssm::cuda
