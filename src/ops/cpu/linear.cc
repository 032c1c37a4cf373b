// Splits a weight matrix over the pool; the products themselves are the slices' business.
#include "ops/cpu/linear.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/flush_denormals.h"
#include "ops/cpu/linear_slice.h"

namespace replayssm::cpu {
namespace {

// Slices are whole blocks of the packed layouts, and large enough to be worth waking a thread for.
constexpr int64_t kSliceRows = 64;
constexpr int64_t kSliceBytes = 32 << 10;

// Any alignment: the source may be a mapped file.
template <class From, class To>
void convert(const std::byte* from, int64_t count, To* to) {
  for (int64_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(From)), sizeof value);
    to[i] = from_float<To>(to_float(value));
  }
}

void convert(const std::byte* from, DType from_dtype, int64_t count, std::byte* to, DType dtype) {
  if (from_dtype == dtype) {
    std::memcpy(to, from, static_cast<size_t>(count * dtype_bytes(dtype)));
    return;
  }
  dispatch_float(from_dtype, [&]<class From>() {
    dispatch_float(dtype,
                   [&]<class To>() { convert<From, To>(from, count, reinterpret_cast<To*>(to)); });
  });
}

}  // namespace

void SliceSource::copy_rows(int64_t first, int64_t count, void* out) const {
  auto* to = static_cast<std::byte*>(out);
  int64_t row = begin + first;
  for (const auto& block : blocks) {
    if (row < block.rows && count > 0) {
      const int64_t here = std::min(count, block.rows - row);
      const auto* from =
          static_cast<const std::byte*>(block.data) + row * in_features * dtype_bytes(block.dtype);
      convert(from, block.dtype, here * in_features, to, dtype);
      to += here * in_features * dtype_bytes(dtype);
      count -= here;
      row += here;
    }
    row -= block.rows;
  }
}

struct Linear::Impl {
  int64_t in_features = 0;
  int64_t out_features = 0;
  int64_t pool_size = 0;
  DType dtype = DType::kBFloat16;
  std::vector<int64_t> begin;  // of every slice, and the end
  std::vector<std::unique_ptr<MatrixSlice>> slices;
};

Linear::Linear() = default;
Linear::~Linear() = default;
Linear::Linear(Linear&&) noexcept = default;
Linear& Linear::operator=(Linear&&) noexcept = default;

Linear::Linear(const std::vector<WeightRows>& blocks, int64_t in_features, DType dtype,
               ThreadPool& pool, const float* bias)
    : impl_(std::make_unique<Impl>()) {
  REPLAYSSM_CHECK(in_features > 0, "in_features=", in_features);
  REPLAYSSM_CHECK(dtype != DType::kFloat16, "dtype=", dtype_name(dtype));
  auto& impl = *impl_;
  impl.in_features = in_features;
  impl.dtype = dtype;
  impl.pool_size = pool.size();
  for (const auto& block : blocks) {
    REPLAYSSM_CHECK(block.rows >= 0 && (block.data || block.rows == 0), "rows=", block.rows);
    impl.out_features += block.rows;
  }

  const int64_t units = (impl.out_features + kSliceRows - 1) / kSliceRows;
  const int64_t bytes = impl.out_features * in_features * dtype_bytes(dtype);
  const int64_t count =
      std::min({impl.pool_size, units, std::max(bytes / kSliceBytes, int64_t{1})});
  for (int64_t i = 0; i <= count; ++i)
    impl.begin.push_back(std::min(count ? units * i / count * kSliceRows : 0, impl.out_features));
  impl.slices.resize(static_cast<size_t>(count));
  pool.run([&](int thread) {
    const auto i = static_cast<size_t>(thread);
    if (i >= impl.slices.size()) return;
    const SliceSource source{blocks, in_features, dtype, bias, impl.begin[i], impl.begin[i + 1]};
    impl.slices[i] = make_onednn_slice(source, pool, thread);
    if (!impl.slices[i]) impl.slices[i] = make_plain_slice(source);
  });
}

int64_t Linear::in_features() const { return impl_ ? impl_->in_features : 0; }
int64_t Linear::out_features() const { return impl_ ? impl_->out_features : 0; }

int64_t Linear::weight_bytes() const {
  int64_t bytes = 0;
  if (impl_)
    for (const auto& slice : impl_->slices) bytes += slice->bytes();
  return bytes;
}

void Linear::apply(const void* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride,
                   ThreadPool& pool) const {
  REPLAYSSM_CHECK(impl_, "the product has no weights");
  const auto& impl = *impl_;
  REPLAYSSM_CHECK(pool.size() == impl.pool_size, "pool of ", pool.size(), ", constructed with ",
                  impl.pool_size);
  if (rows == 0 || impl.slices.empty()) return;
  REPLAYSSM_CHECK(rows == 1 || (x_stride >= impl.in_features && y_stride >= impl.out_features),
                  "x_stride=", x_stride, " y_stride=", y_stride, " for [", impl.out_features, ", ",
                  impl.in_features, "]");
  const auto run = [&](int thread) {
    const auto i = static_cast<size_t>(thread);
    if (i < impl.slices.size())
      impl.slices[i]->apply({x, x_stride, rows, y + impl.begin[i], y_stride}, pool, thread);
  };
  if (impl.slices.size() == 1) {
    const FlushDenormals mode;
    run(0);
  } else {
    pool.run(run);
  }
}

}  // namespace replayssm::cpu
