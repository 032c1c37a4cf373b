#include "model/tensor.h"

#include <algorithm>
#include <cstring>

#include "core/buffer.h"
#include "core/check.h"
#include "core/dispatch.h"
#include "model/tensor_ops.h"

namespace replayssm {
namespace {

constexpr int64_t kOwnPages = 1 << 20;  // from this size on memory is given back to the system

// An uninitialised tensor and the memory to fill it through.
std::pair<Tensor, std::byte*> allocate(DType dtype, std::vector<int64_t> shape) {
  Tensor tensor{.dtype = dtype, .shape = std::move(shape), .data = nullptr, .storage = {}};
  const int64_t bytes = tensor.bytes();
  std::byte* data = nullptr;
  if (bytes >= kOwnPages) {
    auto buffer = std::make_shared<Buffer>(bytes);
    data = buffer->as<std::byte>();
    tensor.storage = std::move(buffer);
  } else {  // operator new[] aligns for every element type
    std::shared_ptr<std::byte[]> block(
        new std::byte[static_cast<size_t>(std::max<int64_t>(bytes, 1))]);
    data = block.get();
    tensor.storage = std::move(block);
  }
  tensor.data = data;
  return {std::move(tensor), data};
}

// Rows of a matrix that is one range.
Tensor gather_random(const Tensor& matrix, std::vector<int64_t> shape,
                     std::span<const RowRange> rows) {
  const int64_t width = matrix.elements() / matrix.shape[0];
  Tensor gathered{.dtype = matrix.dtype, .shape = std::move(shape), .data = nullptr, .storage = {}};
  for (const RowRange& range : rows) {
    const auto first = static_cast<uint64_t>(range.first * width);
    gathered.random.push_back({matrix.random[0].first + first, range.count * width});
  }
  return gathered;
}

}  // namespace

Tensor Tensor::on_host() const {
  if (random.empty()) return *this;
  auto [tensor, to] = allocate(dtype, shape);
  write_tensor(*this, dtype, to, host_memory());
  return tensor;
}

std::vector<float> Tensor::to_floats() const {
  std::vector<float> values(static_cast<size_t>(elements()));
  if (!random.empty()) {
    write_tensor(*this, DType::kFloat32, reinterpret_cast<std::byte*>(values.data()),
                 host_memory());
    return values;
  }
  dispatch_float(dtype, [&]<class T>() {
    for (size_t i = 0; i < values.size(); ++i) {
      T value;
      std::memcpy(&value, data + i * sizeof(T), sizeof(T));
      values[i] = to_float(value);
    }
  });
  return values;
}

void write_tensor(const Tensor& tensor, DType dtype, std::byte* to, Memory& memory) {
  if (!tensor.random.empty()) {
    for (const auto& [first, count] : tensor.random) {
      memory.write_random(to, dtype, first, count);
      to += count * dtype_bytes(dtype);
    }
    return;
  }
  if (tensor.dtype == dtype) return memory.write(to, tensor.data, tensor.bytes());
  const auto values = tensor.to_floats();
  dispatch_float(dtype, [&]<class T>() {
    std::vector<T> converted(values.size());
    std::ranges::transform(values, converted.begin(), from_float<T>);
    memory.write(to, converted.data(), static_cast<int64_t>(converted.size() * sizeof(T)));
  });
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

Tensor copied(const Tensor& tensor) {
  auto [copy, data] = allocate(tensor.dtype, tensor.shape);
  std::memcpy(data, tensor.data, static_cast<size_t>(tensor.bytes()));
  return copy;
}

Tensor gather_rows(const Tensor& matrix, std::span<const RowRange> rows) {
  std::vector<int64_t> shape = matrix.shape;
  REPLAYSSM_CHECK(!shape.empty() && shape[0] > 0, "shape ", shape_text(shape));
  const int64_t row_bytes = matrix.bytes() / shape[0];
  shape[0] = 0;
  for (const RowRange& range : rows) {
    REPLAYSSM_CHECK(range.first >= 0 && range.first + range.count <= matrix.shape[0], "rows from ",
                    range.first, " of ", matrix.shape[0]);
    shape[0] += range.count;
  }
  if (matrix.random.size() == 1) return gather_random(matrix, std::move(shape), rows);
  const Tensor source = matrix.on_host();
  auto [gathered, data] = allocate(matrix.dtype, std::move(shape));
  for (const RowRange& range : rows) {
    const auto bytes = static_cast<size_t>(range.count * row_bytes);
    std::memcpy(data, source.data + range.first * row_bytes, bytes);
    data += bytes;
  }
  return gathered;
}

Tensor gather_columns(const Tensor& matrix, const RowRange& columns) {
  REPLAYSSM_CHECK(matrix.shape.size() == 2 && columns.first >= 0 &&
                      columns.first + columns.count <= matrix.shape[1],
                  "columns from ", columns.first, " of ", shape_text(matrix.shape));
  const int64_t element = dtype_bytes(matrix.dtype);
  const Tensor source = matrix.on_host();
  auto [gathered, data] = allocate(matrix.dtype, {matrix.shape[0], columns.count});
  for (int64_t row = 0; row < matrix.shape[0]; ++row) {
    const std::byte* from = source.data + (row * matrix.shape[1] + columns.first) * element;
    std::memcpy(data + row * columns.count * element, from,
                static_cast<size_t>(columns.count * element));
  }
  return gathered;
}

Tensor one_plus(const Tensor& tensor) {
  std::vector<float> values = tensor.to_floats();
  for (float& value : values) value += 1.0f;
  auto [sum, data] = allocate(DType::kFloat32, tensor.shape);
  std::memcpy(data, values.data(), static_cast<size_t>(sum.bytes()));
  return sum;
}

}  // namespace replayssm
