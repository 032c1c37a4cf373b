// Rows of values on the device: what the dense ops read and write.
#pragma once

#include "core/dispatch.h"
#include "ops/cuda/dense.h"
#include "ops/cuda/launches.h"
#include "ops/dense_test_util.h"

namespace replayssm::testing {

// Values rounded to `dtype`, rows `stride` apart with NaN in between.
struct Rows {
  Rows(std::vector<float> given, int64_t dim, int64_t row_stride, DType type)
      : values(std::move(given)), stride(row_stride), dtype(type) {
    const auto rows = static_cast<int64_t>(values.size()) / dim;
    dispatch_float(dtype, [&]<class T>() {
      std::vector<uint8_t> bytes(rows * stride * sizeof(T), 0xff);
      for (int64_t i = 0; i < rows * dim; ++i) {
        const T x = from_float<T>(values[i]);
        values[i] = to_float(x);
        reinterpret_cast<T*>(bytes.data())[i / dim * stride + i % dim] = x;
      }
      data = bytes;
    });
  }
  Rows(int64_t rows, int64_t dim, int64_t row_stride, DType type, uint32_t seed, float scale)
      : Rows(random_values(rows * dim, seed, scale), dim, row_stride, type) {}

  operator cuda::InRows() const { return {data.data(), stride, dtype}; }

  std::vector<float> values;
  int64_t stride;
  DType dtype;
  DeviceArray<uint8_t> data;
};

// Rows to be written, NaN before that, or changed in place.
class OutputRows {
 public:
  OutputRows(int64_t rows, int64_t dim, int64_t stride, DType dtype)
      : dim_(dim), stride_(stride), dtype_(dtype) {
    data_ = std::vector<uint8_t>(rows * stride * dtype_bytes(dtype), 0xff);
  }
  OutputRows(const Rows& start, int64_t dim)
      : dim_(dim), stride_(start.stride), dtype_(start.dtype) {
    std::vector<uint8_t> bytes;
    start.data.download(bytes);
    data_ = bytes;
  }
  operator cuda::OutRows() const { return {data_.data(), stride_, dtype_}; }

  // The rows; what lies between them must still be NaN.
  std::vector<float> values() const {
    std::vector<uint8_t> bytes;
    data_.download(bytes);
    std::vector<float> all;
    dispatch_float(dtype_, [&]<class T>() {
      for (size_t i = 0; i < bytes.size() / sizeof(T); ++i)
        all.push_back(to_float(reinterpret_cast<const T*>(bytes.data())[i]));
    });
    return gather(all, dim_, stride_);
  }

 private:
  int64_t dim_, stride_;
  DType dtype_;
  DeviceArray<uint8_t> data_;
};

// What `call` leaves in fresh rows, the same in five runs and a captured one.
inline std::vector<float> run_rows(
    int64_t rows, int64_t dim, int64_t stride, DType dtype,
    const std::function<void(const cuda::OutRows&, cudaStream_t)>& call) {
  const auto bits = same_in_every_run([&](bool graph) {
    const OutputRows out(rows, dim, stride, dtype);
    run_call([&](cudaStream_t stream) { call(out, stream); }, graph);
    std::vector<uint32_t> bits;
    for (const float x : out.values()) bits.push_back(std::bit_cast<uint32_t>(x));
    return bits;
  });
  std::vector<float> values;
  for (const uint32_t x : bits) values.push_back(std::bit_cast<float>(x));
  return values;
}
// The same for a call that changes rows in place.
inline std::vector<float> run_rows_in_place(
    const Rows& start, int64_t dim,
    const std::function<void(const cuda::OutRows&, cudaStream_t)>& call) {
  const OutputRows out(start, dim);
  run_call([&](cudaStream_t stream) { call(out, stream); });
  return out.values();
}

// The message of the Error that fn throws; empty if it throws none.
inline std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace replayssm::testing
