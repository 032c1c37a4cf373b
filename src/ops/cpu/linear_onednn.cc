// Matrix products through oneDNN 2.x, the only file that knows it.
//
// A slice is a row of tiles of kTileColumns outputs, each packed on its own and small enough for
// the second-level cache, so that a long prompt streams every tile once. All tiles with the same K
// share their primitives. oneDNN serves bf16 with its fast kernels only where source and
// destination are dense: strided ones pass through scratch memory.
//
// A primitive is compiled for a number of rows: rows are taken kMaxRows at a time, the rest is
// padded to the next of a few sizes. So a thread compiles at most std::size(kRowSizes) primitives
// per shape, each once.
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <dnnl.hpp>
#include <iterator>
#include <map>
#include <optional>

#include "core/check.h"
#include "ops/cpu/linear_slice.h"

namespace replayssm::cpu {
namespace {

using dnnl::memory;

constexpr int64_t kTileColumns = 256;
constexpr int64_t kRowSizes[] = {1,  2,  3,  4,  5,  6,  7,  8,  10, 12,
                                 14, 16, 20, 24, 28, 32, 40, 48, 56, 64};
constexpr int64_t kMaxRows = *std::rbegin(kRowSizes);
constexpr size_t kMaxProducts = 512;
constexpr int64_t kAlignment = 64;

int64_t align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// oneDNN sizes its parallel regions by OpenMP's setting for the calling thread.
class SingleThreaded {
 public:
  SingleThreaded() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SingleThreaded() { omp_set_num_threads(before_); }
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  int before_;
};

struct Shape {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t depth = 0;
  memory::data_type type = memory::data_type::bf16;
  bool bias = false;

  auto operator<=>(const Shape&) const = default;
};

struct Product {
  dnnl::matmul matmul;
  memory::desc weights;
  memory x, w, bias, y, scratch;
  int64_t scratch_bytes = 0;
};

// What a thread keeps between calls, for all matrices.
struct Workspace {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::map<Shape, Product> products;
  Buffer buffer;

  std::byte* scratch(int64_t bytes) {
    if (buffer.bytes() < bytes) buffer = Buffer(bytes);
    return buffer.as<>();
  }
  // `weights` is the packed layout, or empty to ask for the best one.
  Product& product(const Shape& shape, const memory::desc& weights);
};

Product make_product(const Shape& shape, const memory::desc& weights, const dnnl::engine& engine) {
  const auto [rows, columns, depth, type, bias] = shape;
  const auto dense = memory::format_tag::ab;
  const auto f32 = memory::data_type::f32;
  const memory::desc x({rows, depth}, type, dense);
  const memory::desc y({rows, columns}, f32, dense);
  const memory::desc b({1, columns}, f32, dense);
  const memory::desc w =
      weights.is_zero() ? memory::desc({depth, columns}, type, memory::format_tag::any) : weights;
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const dnnl::matmul::primitive_desc description(
      bias ? dnnl::matmul::desc(x, w, b, y) : dnnl::matmul::desc(x, w, y), attributes, engine);
  const auto unbound = [&](const memory::desc& d) { return memory(d, engine, DNNL_MEMORY_NONE); };
  const auto scratch = description.scratchpad_desc();
  return {dnnl::matmul(description),
          description.weights_desc(),
          unbound(x),
          unbound(description.weights_desc()),
          unbound(b),
          unbound(y),
          unbound(scratch),
          static_cast<int64_t>(scratch.get_size())};
}

Product& Workspace::product(const Shape& shape, const memory::desc& weights) {
  const auto found = products.find(shape);
  if (found != products.end()) return found->second;
  if (products.size() >= kMaxProducts) products.clear();
  return products.emplace(shape, make_product(shape, weights, engine)).first->second;
}

// Dense copy of rows `stride` apart, zero up to `padded` rows: leftovers may be slow subnormals.
void gather_rows(const std::byte* from, int64_t stride, int64_t rows, int64_t row_bytes,
                 int64_t padded, std::byte* to) {
  for (int64_t i = 0; i < rows; ++i)
    std::memcpy(to + i * row_bytes, from + i * stride, static_cast<size_t>(row_bytes));
  std::memset(to + rows * row_bytes, 0, static_cast<size_t>((padded - rows) * row_bytes));
}

class OnednnSlice final : public MatrixSlice {
 public:
  OnednnSlice(const SliceSource& source, Workspace& workspace);
  int64_t bytes() const override { return weights_.bytes() + bias_.bytes(); }
  void apply(const SliceProduct& product, ThreadPool& pool, int thread) const override;

 private:
  struct Tile {
    int64_t begin = 0;
    int64_t columns = 0;
    int64_t offset = 0;  // in weights_
    memory::desc packed;
  };

  Shape shape(const Tile& tile, int64_t rows) const {
    return {rows, tile.columns, depth_, type_, bias_.bytes() > 0};
  }
  void pack(const Tile& tile, const SliceSource& source, Workspace& workspace, std::byte* staging);
  void multiply(const Tile& tile, const SliceProduct& product, int64_t first, int64_t rows,
                Workspace& workspace) const;

  int64_t depth_;
  int64_t element_bytes_;
  memory::data_type type_;
  std::vector<Tile> tiles_;
  Buffer weights_;
  Buffer bias_;  // [rows of the slice] fp32, or empty
};

OnednnSlice::OnednnSlice(const SliceSource& source, Workspace& workspace)
    : depth_(source.in_features),
      element_bytes_(dtype_bytes(source.dtype)),
      type_(source.dtype == DType::kBFloat16 ? memory::data_type::bf16 : memory::data_type::f32),
      bias_(source.bias ? source.rows() * static_cast<int64_t>(sizeof(float)) : 0) {
  int64_t bytes = 0;
  for (int64_t begin = 0; begin < source.rows(); begin += kTileColumns) {
    Tile tile{begin, std::min(kTileColumns, source.rows() - begin), bytes, {}};
    tile.packed = workspace.product(shape(tile, 1), {}).weights;
    bytes += align(static_cast<int64_t>(tile.packed.get_size()));
    tiles_.push_back(tile);
  }
  weights_ = Buffer(bytes);
  Buffer staging(std::min(kTileColumns, source.rows()) * depth_ * element_bytes_);
  for (const auto& tile : tiles_) pack(tile, source, workspace, staging.as<>());
  if (source.bias)
    std::memcpy(bias_.as<>(), source.bias + source.begin, static_cast<size_t>(bias_.bytes()));
}

void OnednnSlice::pack(const Tile& tile, const SliceSource& source, Workspace& workspace,
                       std::byte* staging) {
  source.copy_rows(tile.begin, tile.columns, staging);
  const memory::desc plain({depth_, tile.columns}, type_, memory::format_tag::ba);
  memory from(plain, workspace.engine, staging);
  memory to(tile.packed, workspace.engine, weights_.as<>() + tile.offset);
  dnnl::reorder(from, to).execute(workspace.stream, from, to);
  workspace.stream.wait();
}

void OnednnSlice::multiply(const Tile& tile, const SliceProduct& product, int64_t first,
                           int64_t rows, Workspace& workspace) const {
  const int64_t padded = *std::lower_bound(std::begin(kRowSizes), std::end(kRowSizes), rows);
  auto& p = workspace.product(shape(tile, padded), tile.packed);
  const int64_t row_bytes = depth_ * element_bytes_;
  const int64_t x_bytes = align(padded * row_bytes);
  const int64_t y_bytes = align(padded * tile.columns * static_cast<int64_t>(sizeof(float)));
  std::byte* scratch = workspace.scratch(x_bytes + y_bytes + p.scratch_bytes);

  const auto* x =
      static_cast<const std::byte*>(product.x) + first * product.x_stride * element_bytes_;
  const bool dense_x = rows == padded && (rows == 1 || product.x_stride == depth_);
  if (!dense_x) gather_rows(x, product.x_stride * element_bytes_, rows, row_bytes, padded, scratch);
  float* y = product.y + first * product.y_stride + tile.begin;
  const bool dense_y = rows == padded && (rows == 1 || product.y_stride == tile.columns);
  auto* y_scratch = reinterpret_cast<float*>(scratch + x_bytes);

  p.x.set_data_handle(dense_x ? const_cast<std::byte*>(x) : scratch);
  p.w.set_data_handle(weights_.as<>() + tile.offset);
  p.y.set_data_handle(dense_y ? y : y_scratch);
  p.scratch.set_data_handle(scratch + x_bytes + y_bytes);
  std::unordered_map<int, memory> arguments{{DNNL_ARG_SRC, p.x},
                                            {DNNL_ARG_WEIGHTS, p.w},
                                            {DNNL_ARG_DST, p.y},
                                            {DNNL_ARG_SCRATCHPAD, p.scratch}};
  if (bias_.bytes() > 0) {
    p.bias.set_data_handle(bias_.as<float>() + tile.begin);
    arguments.emplace(DNNL_ARG_BIAS, p.bias);
  }
  p.matmul.execute(workspace.stream, arguments);
  workspace.stream.wait();
  if (dense_y) return;
  for (int64_t i = 0; i < rows; ++i)
    std::copy_n(y_scratch + i * tile.columns, tile.columns, y + i * product.y_stride);
}

void OnednnSlice::apply(const SliceProduct& product, ThreadPool& pool, int thread) const {
  const SingleThreaded single_threaded;
  auto& workspace = pool.local<Workspace>(thread);
  for (const auto& tile : tiles_)
    for (int64_t first = 0; first < product.rows; first += kMaxRows)
      multiply(tile, product, first, std::min(kMaxRows, product.rows - first), workspace);
}

}  // namespace

std::unique_ptr<MatrixSlice> make_onednn_slice(const SliceSource& source, ThreadPool& pool,
                                               int thread) {
  const SingleThreaded single_threaded;
  try {
    return std::make_unique<OnednnSlice>(source, pool.local<Workspace>(thread));
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_unimplemented) return nullptr;
    fail("oneDNN refused a ", source.rows(), " x ", source.in_features, " ",
         dtype_name(source.dtype), " matrix: ", error.what());
  }
}

}  // namespace replayssm::cpu
