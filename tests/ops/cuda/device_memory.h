// Device memory of the tests.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

#include "ops/cuda/check_cuda.h"

namespace replayssm::testing {

// A device array. Behind its end lie bytes that no kernel may change.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(const std::vector<T>& values) { *this = values; }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  // Keeps its memory, and so its address, where the size stays.
  DeviceArray& operator=(const std::vector<T>& values) {
    if (values.size() != size_) {
      cudaFree(data_);
      data_ = nullptr;
      size_ = values.size();
      if (size_ > 0)
        cuda::check_cuda(cudaMalloc(reinterpret_cast<void**>(&data_), size_ * sizeof(T)),
                         "cudaMalloc");
    }
    if (size_ > 0)
      cuda::check_cuda(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice),
                       "upload");
    return *this;
  }
  void download(std::vector<T>& values) const {
    values.resize(size_);
    if (size_ > 0)
      cuda::check_cuda(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
                       "download");
  }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

inline bool has_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// First line of a test that runs kernels.
#define REQUIRE_DEVICE() \
  if (!has_device()) GTEST_SKIP() << "no CUDA device here"

}  // namespace replayssm::testing
