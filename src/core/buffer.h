// Memory owned by one object: zeroed, aligned for any SIMD width.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/memory.h"

namespace replayssm {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes, Memory& memory = host_memory());  // throws Error
  ~Buffer();
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        memory_(other.memory_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(memory_, other.memory_);
    return *this;
  }

  template <class T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  Memory* memory_ = nullptr;
};

// A Buffer of `count` elements of T. Elements and ranges are for the host's memory.
template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(int64_t count, Memory& memory = host_memory())
      : buffer_(count * static_cast<int64_t>(sizeof(T)), memory), count_(count) {}

  T* data() const { return buffer_.template as<T>(); }
  int64_t size() const { return count_; }
  int64_t bytes() const { return buffer_.bytes(); }
  T& operator[](int64_t i) const { return data()[i]; }
  T* begin() const { return data(); }
  T* end() const { return data() + count_; }

 private:
  Buffer buffer_;
  int64_t count_ = 0;
};

}  // namespace replayssm
