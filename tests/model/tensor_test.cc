#include "model/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "core/check.h"
#include "model/folders.h"
#include "model/tensor_ops.h"

namespace replayssm::testing {
namespace {

template <class T>
Tensor view_of(DType dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  return {dtype, std::move(shape), reinterpret_cast<const std::byte*>(values.data()), nullptr};
}

TEST(Tensor, ToFloats) {
  const std::vector<uint16_t> bf16{0x3f80, 0xc000, 0x7f80, 0x0001};
  EXPECT_EQ(view_of(DType::kBFloat16, {4}, bf16).to_floats(),
            (std::vector<float>{1, -2, INFINITY, std::ldexp(1.0f, -133)}));
  const std::vector<uint16_t> fp16{0x3c00, 0xc000, 0x7c00, 0x0001};
  EXPECT_EQ(view_of(DType::kFloat16, {4}, fp16).to_floats(),
            (std::vector<float>{1, -2, INFINITY, std::ldexp(1.0f, -24)}));
  const std::vector<float> fp32{1.5f, -3};
  EXPECT_EQ(view_of(DType::kFloat32, {2, 1}, fp32).to_floats(), fp32);
}

TEST(Tensor, ToFloatsOfMisalignedData) {
  const std::vector<float> values{1, 2};
  std::vector<char> bytes(9);
  std::memcpy(bytes.data() + 1, values.data(), 8);
  const Tensor tensor{
      DType::kFloat32, {2}, reinterpret_cast<const std::byte*>(bytes.data() + 1), nullptr};
  EXPECT_EQ(tensor.to_floats(), values);
  const Tensor copy = copied(tensor);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(copy.data) % alignof(float), 0);
  EXPECT_EQ(copy.to_floats(), values);
}

TEST(Tensor, GatherRows) {
  const std::vector<float> values{0, 1, 10, 11, 20, 21, 30, 31};
  const Tensor matrix = view_of(DType::kFloat32, {4, 2}, values);
  const RowRange rows[] = {{2, 2}, {0, 1}};
  const Tensor gathered = gather_rows(matrix, rows);
  EXPECT_EQ(gathered.shape, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(gathered.to_floats(), (std::vector<float>{20, 21, 30, 31, 0, 1}));
  const RowRange outside[] = {{3, 2}};
  EXPECT_THROW(gather_rows(matrix, outside), Error);
}

TEST(Tensor, LargeCopies) {
  const std::vector<float> values(1 << 19, 2.5f);
  EXPECT_EQ(copied(view_of(DType::kFloat32, {1 << 19}, values)).to_floats(), values);
}

// In fp32: bf16 would lose w.
TEST(Tensor, OnePlus) {
  const std::vector<uint16_t> w{0x3a83, 0xbf80};  // about 0.001, -1
  const Tensor sum = one_plus(view_of(DType::kBFloat16, {2}, w));
  EXPECT_EQ(sum.dtype, DType::kFloat32);
  EXPECT_EQ(sum.to_floats(), (std::vector<float>{1 + 0x1.06p-10f, 0}));
}

TEST(Tensor, ShapeText) {
  EXPECT_EQ(shape_text(std::vector<int64_t>{}), "[]");
  EXPECT_EQ(shape_text(std::vector<int64_t>{3, 4}), "[3, 4]");
}

}  // namespace
}  // namespace replayssm::testing
