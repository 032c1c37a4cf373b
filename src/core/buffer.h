// Memory owned by one object: zeroed, aligned for any SIMD width, backed by huge pages where large.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace replayssm {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes);  // zero-filled; throws Error when the system refuses
  ~Buffer();
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
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
};

// A Buffer of `count` elements of T.
template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(int64_t count) : buffer_(count * static_cast<int64_t>(sizeof(T))), count_(count) {}

  T* data() const { return buffer_.template as<T>(); }
  int64_t size() const { return count_; }
  T& operator[](int64_t i) const { return data()[i]; }
  T* begin() const { return data(); }
  T* end() const { return data() + count_; }

 private:
  Buffer buffer_;
  int64_t count_ = 0;
};

}  // namespace replayssm
