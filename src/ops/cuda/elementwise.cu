// Element-wise ops over rows: a thread has a run of consecutive elements of one row, of eight where
// sizes and addresses allow.

#include <algorithm>

#include "ops/cuda/check_rows.h"
#include "ops/cuda/dense.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/mlp_gates.cuh"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 256, kVec = 8;

template <int kCount>
__device__ inline void load(const InRows& rows, int64_t row, int64_t column, float (&x)[kCount]) {
  load_run<kCount>(rows.data, rows.dtype, row * rows.stride + column, x);
}
template <int kCount>
__device__ inline void load(const OutRows& rows, int64_t row, int64_t column, float (&x)[kCount]) {
  load_run<kCount>(rows.data, rows.dtype, row * rows.stride + column, x);
}
template <int kCount>
__device__ inline void store(const OutRows& rows, int64_t row, int64_t column,
                             const float (&x)[kCount]) {
  store_run<kCount>(rows.data, rows.dtype, row * rows.stride + column, x);
}

// What each op does with a run that begins at a row's column.
struct Embed {
  InRows table;
  const int32_t *ids, *drawn;
  float scale;
  OutRows out;

  template <int kCount>
  __device__ void run(int64_t row, int64_t column) const {
    float x[kCount] = {};
    int64_t id = ids[row];
    if (drawn && id <= -2) id = drawn[-2 - id];
    if (id >= 0) load(table, id, column, x);
#pragma unroll
    for (float& value : x) value *= scale;
    store(out, row, column, x);
  }
};

struct SwiGlu {
  InRows gate_up;
  float scale;
  int64_t dim;
  OutRows y;

  template <int kCount>
  __device__ void run(int64_t row, int64_t column) const {
    float gate[kCount], up[kCount];
    load(gate_up, row, column, gate);
    load(gate_up, row, dim + column, up);
#pragma unroll
    for (int i = 0; i < kCount; ++i) up[i] = swiglu(gate[i], scale, up[i]);
    store(y, row, column, up);
  }
};

struct ReluSquared {
  InRows x;
  float scale;
  OutRows y;

  template <int kCount>
  __device__ void run(int64_t row, int64_t column) const {
    float value[kCount];
    load(x, row, column, value);
#pragma unroll
    for (float& v : value) v = relu_squared(v, scale);
    store(y, row, column, value);
  }
};

struct SigmoidGate {
  InRows x, gate;
  OutRows y;

  template <int kCount>
  __device__ void run(int64_t row, int64_t column) const {
    float value[kCount], z[kCount];
    load(x, row, column, value);
    load(gate, row, column, z);
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] *= sigmoid(z[i]);
    store(y, row, column, value);
  }
};

struct AddScaled {
  InRows x;
  float scale;
  OutRows y;

  template <int kCount>
  __device__ void run(int64_t row, int64_t column) const {
    float value[kCount], sum[kCount];
    load(x, row, column, value);
    load(y, row, column, sum);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = fmaf(value[i], scale, sum[i]);
    store(y, row, column, sum);
  }
};

struct ScaleColumns {
  OutRows x;
  const float* scale;

  template <int kCount>
  __device__ void run(int64_t row, int64_t column) const {
    float value[kCount], factor[kCount];
    load(x, row, column, value);
    load_run<float, kCount>(scale + column, factor);
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] *= factor[i];
    store(x, row, column, value);
  }
};

struct ConvertHeads {
  InRows x;
  int64_t x_head_stride, heads, dim;
  OutRows y;
  int64_t y_head_stride;

  template <int kCount>
  __device__ void run(int64_t row, int64_t column) const {
    const auto head = static_cast<uint32_t>(column) / static_cast<uint32_t>(dim);
    const int64_t element = column - head * dim;
    float value[kCount];
    load(x, row, head * x_head_stride + element, value);
    store(y, row, head * y_head_stride + element, value);
  }
};

template <class Op, int kCount>
__global__ void __launch_bounds__(kThreads)
    elementwise_kernel(const __grid_constant__ Op op, uint32_t count, uint32_t runs) {
  release_successor();
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x, row = i / runs;
  wait_for_predecessor();
  if (i < count) op.template run<kCount>(row, int64_t{i - row * runs} * kCount);
}

template <class Op>
void launch(const char* what, const Op& op, int64_t rows, int64_t dim, bool vectors,
            cudaStream_t stream) {
  const int64_t runs = vectors ? dim / kVec : dim, count = rows * runs;
  if (count > INT32_MAX) fail("rows: expected fewer, got ", rows, " of ", dim, " elements");
  const auto start = [&](auto kernel) {
    launch_dependent(what, kernel, dim3(blocks_for(count, kThreads)), kThreads, 0, stream, op,
                     static_cast<uint32_t>(count), static_cast<uint32_t>(runs));
  };
  if (vectors) return start(elementwise_kernel<Op, kVec>);
  start(elementwise_kernel<Op, 1>);
}

// False: there is nothing to do.
bool check_sizes(int64_t rows, int64_t dim) {
  check_count("rows", rows, 0);
  check_count("dim", dim, 1);
  return rows > 0;
}

}  // namespace

void embed(const InRows& table, const int32_t* ids, const int32_t* drawn, int64_t rows, int64_t dim,
           float scale, const OutRows& out, cudaStream_t stream) {
  if (!check_sizes(rows, dim)) return;
  check_rows("table", table, 2, dim);
  check_rows("out", out, rows, dim);
  check_pointer("ids", ids, sizeof(int32_t));
  launch("embed", Embed{table, ids, drawn, scale, out}, rows, dim,
         dim % kVec == 0 && rows_aligned(table) && rows_aligned(out), stream);
}

void swiglu(const InRows& gate_up, float scale, int64_t rows, int64_t dim, const OutRows& y,
            cudaStream_t stream) {
  if (!check_sizes(rows, dim)) return;
  check_rows("gate_up", gate_up, rows, 2 * dim);
  check_rows("y", y, rows, dim);
  launch("swiglu", SwiGlu{gate_up, scale, dim, y}, rows, dim,
         dim % kVec == 0 && rows_aligned(gate_up) && rows_aligned(y), stream);
}

void relu_squared(const InRows& x, float scale, int64_t rows, int64_t dim, const OutRows& y,
                  cudaStream_t stream) {
  if (!check_sizes(rows, dim)) return;
  check_rows("x", x, rows, dim);
  check_rows("y", y, rows, dim);
  if (!(scale > 0)) fail("scale: expected above 0, got ", scale);
  launch("relu_squared", ReluSquared{x, scale, y}, rows, dim,
         dim % kVec == 0 && rows_aligned(x) && rows_aligned(y), stream);
}

void sigmoid_gate(const InRows& x, const InRows& gate, int64_t rows, int64_t dim, const OutRows& y,
                  cudaStream_t stream) {
  if (!check_sizes(rows, dim)) return;
  check_rows("x", x, rows, dim);
  check_rows("gate", gate, rows, dim);
  check_rows("y", y, rows, dim);
  launch("sigmoid_gate", SigmoidGate{x, gate, y}, rows, dim,
         dim % kVec == 0 && rows_aligned(x) && rows_aligned(gate) && rows_aligned(y), stream);
}

void add_scaled(const InRows& x, float scale, int64_t rows, int64_t dim, const OutRows& y,
                cudaStream_t stream) {
  if (!check_sizes(rows, dim)) return;
  check_rows("x", x, rows, dim);
  check_rows("y", y, rows, dim);
  launch("add_scaled", AddScaled{x, scale, y}, rows, dim,
         dim % kVec == 0 && rows_aligned(x) && rows_aligned(y), stream);
}

void scale_columns(const OutRows& x, const float* scale, int64_t rows, int64_t dim,
                   cudaStream_t stream) {
  if (!check_sizes(rows, dim)) return;
  check_rows("x", x, rows, dim);
  check_pointer("scale", scale, sizeof(float));
  launch("scale_columns", ScaleColumns{x, scale}, rows, dim,
         dim % kVec == 0 && rows_aligned(x) && rows_aligned(scale), stream);
}

void convert_heads(const InRows& x, int64_t x_head_stride, int64_t rows, int64_t heads, int64_t dim,
                   const OutRows& y, int64_t y_head_stride, cudaStream_t stream) {
  check_count("heads", heads, 0);
  if (!check_sizes(rows, dim) || heads == 0) return;
  check_rows("x", x, rows, (heads - 1) * x_head_stride + dim);
  check_rows("y", y, rows, (heads - 1) * y_head_stride + dim);
  const auto heads_aligned = [&](const auto& side, int64_t stride) {
    return rows_aligned(side) &&
           (heads == 1 || rows_aligned(side.data, stride * dtype_bytes(side.dtype)));
  };
  launch("convert_heads", ConvertHeads{x, x_head_stride, heads, dim, y, y_head_stride}, rows,
         heads * dim,
         dim % kVec == 0 && heads_aligned(x, x_head_stride) && heads_aligned(y, y_head_stride),
         stream);
}

}  // namespace replayssm::cuda
