// The current CUDA device: whether it can be used, its memory and a stream of work.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/memory.h"

namespace replayssm::cuda {

// Why nothing runs here (no driver, no device, machine code for another one); empty where it does.
std::string device_obstacle();

class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

// Work on this memory is done in the stream's order.
class DeviceMemory final : public Memory {
 public:
  explicit DeviceMemory(const Stream& stream) : stream_(stream) {}

  void* allocate(int64_t bytes) override;
  void release(void* data, int64_t bytes) noexcept override;
  void zero(void* first, int64_t bytes, int64_t stride, int64_t count) override;
  void write(void* to, const void* host, int64_t bytes) override;
  void write_random(void* to, DType dtype, uint64_t first, int64_t count) override;
  void read(void* host, const void* from, int64_t bytes) override;
  void copy(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t bytes,
            int64_t count) override;
  MemoryCapacity capacity() const override;

  // Pieces given back so far: pointers that were captured before may be stale once it has grown.
  int64_t releases() const { return releases_; }

 private:
  const Stream& stream_;
  int64_t releases_ = 0;
};

// Host memory that the device copies from and to by itself.
class PinnedMemory final : public Memory {
 public:
  void* allocate(int64_t bytes) override;
  void release(void* data, int64_t bytes) noexcept override;
  void zero(void* first, int64_t bytes, int64_t stride, int64_t count) override {
    host_memory().zero(first, bytes, stride, count);
  }
  void write(void* to, const void* host, int64_t bytes) override {
    host_memory().write(to, host, bytes);
  }
  void write_random(void* to, DType dtype, uint64_t first, int64_t count) override {
    host_memory().write_random(to, dtype, first, count);
  }
  void read(void* host, const void* from, int64_t bytes) override {
    host_memory().read(host, from, bytes);
  }
  void copy(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t bytes,
            int64_t count) override {
    host_memory().copy(to, to_stride, from, from_stride, bytes, count);
  }
  MemoryCapacity capacity() const override { return {}; }
};

}  // namespace replayssm::cuda
