// Arrays of any floating-point type on the device, as floats on the host.
#pragma once

#include <cstring>
#include <limits>
#include <random>

#include "core/half.h"
#include "ops/cuda/device_memory.h"
#include "replayssm/paged.h"

namespace replayssm::testing {

// Numbers of a type on the device, with what they are as floats.
class Array {
 public:
  Array(DType dtype, int64_t size, float value = std::numeric_limits<float>::quiet_NaN())
      : dtype_(dtype), x_(size, value) {}

  float& operator[](int64_t i) { return x_[i]; }
  float operator[](int64_t i) const { return x_[i]; }
  void draw(std::mt19937& random, float scale) {
    std::normal_distribution<float> normal(0, scale);
    for (float& x : x_) x = normal(random);
  }
  replayssm_values upload(int64_t s0, int64_t s1 = 0, int64_t s2 = 0) {
    with_type([&](auto zero) {
      using T = decltype(zero);
      std::vector<uint8_t> bytes(x_.size() * sizeof(T));
      for (size_t i = 0; i < x_.size(); ++i) {
        const T value = from_float<T>(x_[i]);
        std::memcpy(&bytes[i * sizeof(T)], &value, sizeof(T));
        x_[i] = to_float(value);
      }
      device_ = bytes;
    });
    return {device_.data(), {s0, s1, s2}, static_cast<replayssm_dtype>(dtype_)};
  }
  std::vector<float> download() const {
    std::vector<uint8_t> bytes;
    device_.download(bytes);
    std::vector<float> values(x_.size());
    with_type([&](auto zero) {
      using T = decltype(zero);
      for (size_t i = 0; i < values.size(); ++i) {
        T value;
        std::memcpy(&value, &bytes[i * sizeof(T)], sizeof(T));
        values[i] = to_float(value);
      }
    });
    return values;
  }
  // Half a unit in the last place of 1.
  double rounding() const {
    return dtype_ == DType::kFloat32 ? 0x1p-24 : dtype_ == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
  }

 private:
  template <class Fn>
  void with_type(Fn&& fn) const {
    if (dtype_ == DType::kFloat32) return fn(0.0f);
    if (dtype_ == DType::kFloat16) return fn(fp16{});
    fn(bf16{});
  }

  const DType dtype_;
  std::vector<float> x_;
  DeviceArray<uint8_t> device_;
};

}  // namespace replayssm::testing
