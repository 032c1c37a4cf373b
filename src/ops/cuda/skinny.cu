// Matrix products of few rows.
//
// A block owns a tile of some rows of the weight, and several blocks a multiprocessor. Its warps
// share the columns: each has a queue of pieces of its own in shared memory, whole lines of every
// row, and waits for nobody. Queues fill before the kernel in front has ended: the device's memory
// is busy meanwhile. Products are those of the tensor cores; at the end the warps add their sums
// together.
//
// A lane's 16 bytes of a row are the operands of two products: which of the columns meet in one is
// no matter as long as weight and x agree.

#include "ops/cuda/skinny.h"

#include "core/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/mlp_gates.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kTileColumns = 8;  // rows of x
constexpr int kElement = 2, kWord = 16, kWordElements = kWord / kElement;
constexpr int kLine = 128, kLineWords = kLine / kWord;
constexpr int kStepColumns = 32, kWarpColumns = kLine / kElement, kColumns = kWarps * kWarpColumns;
constexpr int kQueueBytes = 48 << 10;  // of a block
constexpr int kMostXBytes = 64 << 10;
constexpr int kSmallTilesBelow = 48;  // outputs of a multiprocessor
constexpr int kShift = 64;            // bytes by which rows of x miss each other's banks

struct SkinnyCall {
  const void* x;
  int64_t x_stride;
  const void* weight;
  const float* bias;
  LinearActivation activation;
  float scale;
  void* y;
  int64_t y_stride;
  DType y_dtype;
  int rows, in;
  int outputs;  // pairs of rows of the weight where those are gate and up
  int x_row_bytes;
  RowNorm norm;
  ResidualSum residual;
};

// kRows: of the weight in a tile, 8 or 16.
template <class T, int kRows, bool kPaired>
class Product {
 public:
  static constexpr int kOutputs = kPaired ? kRows / 2 : kRows;
  static constexpr int kPieceWords = kRows * kLineWords;
  static constexpr int kStages = kQueueBytes / (kWarps * kPieceWords * kWord);
  using Sums = float[kWarps][kRows * kTileColumns];

  __device__ Product(const SkinnyCall& p, Sums& sums, char* memory)
      : p_(p),
        sums_(sums),
        queue_(reinterpret_cast<uint4*>(memory) + warp() * kStages * kPieceWords),
        x_(memory + kQueueBytes),
        first_(static_cast<int>(blockIdx.x) * kOutputs) {}

  __device__ void fill_queue() const {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) copy_piece(i, i);
  }

  __device__ void load_x() {
    const int words = p_.in / kWordElements;
    for (int r = 0; r < p_.rows; ++r) {
      const char* from = static_cast<const char*>(p_.x) + r * p_.x_stride * kElement;
      char* to = x_ + r * p_.x_row_bytes;
      for (int i = static_cast<int>(threadIdx.x); i < words; i += kThreads)
        copy_async_16(to + i * kWord, from + i * kWord);
    }
    copy_async_commit();
    if (p_.norm.squares) add_squares();
    copy_async_wait_all();
    __syncthreads();
  }

  __device__ void multiply() {
    float c[4] = {};
    int stage = 0;
    for (int piece = 0; piece * kColumns < p_.in; ++piece) {
      copy_async_wait_but<kStages - 2>();
      __syncwarp();
      add_piece(queue_ + stage * kPieceWords, piece, c);
      copy_piece(piece + kStages - 1, (stage + kStages - 1) % kStages);
      stage = (stage + 1) % kStages;
    }
    finish(c);
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  // Rows lie one behind another, the halves of every second one exchanged: rows side by side meet
  // different banks.
  __device__ static int place(int row, int word) {
    return row * kLineWords + (word ^ (row % 2 * (kLineWords / 2)));
  }
  // Gates come first in a tile, then as many of up.
  __device__ int weight_row(int row) const {
    const bool up = kPaired && row >= kOutputs;
    return first_ + (up ? p_.outputs + row - kOutputs : row);
  }
  __device__ int column_of(int piece) const { return (piece * kWarps + warp()) * kWarpColumns; }

  // Each thread adds up some parts: all warps in the same order.
  __device__ void add_squares() {
    float sum = 0;
    for (int i = lane(); i < p_.norm.parts; i += 32) sum += p_.norm.squares[i];
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
    factor_ = rsqrtf(__fdividef(sum, static_cast<float>(p_.norm.dim)) + p_.norm.eps);
  }

  // What is not there is zero.
  __device__ void copy_piece(int piece, int stage) const {
    const int column = column_of(piece) + lane() % kLineWords * kWordElements;
#pragma unroll
    for (int i = 0; i < kPieceWords / 32; ++i) {
      const int row = i * (32 / kLineWords) + lane() / kLineWords;
      const bool valid = column < p_.in && first_ + row % kOutputs < p_.outputs;
      const int64_t at = valid ? int64_t{weight_row(row)} * p_.in + column : 0;
      copy_async_16_or_zero(queue_ + stage * kPieceWords + place(row, lane() % kLineWords),
                            static_cast<const char*>(p_.weight) + at * kElement, valid);
    }
    copy_async_commit();
  }

  __device__ void add_piece(const uint4* piece, int index, float (&c)[4]) const {
    const int row = lane() / 4;
#pragma unroll
    for (int step = 0; step < kWarpColumns / kStepColumns; ++step) {
      const int word = step * 4 + lane() % 4, column = column_of(index) + word * kWordElements;
      const uint4 a = piece[place(row, word)];
      uint4 b{}, x{};
      if constexpr (kRows > 8) b = piece[place(row + 8, word)];
      if (row < p_.rows && column < p_.in)
        x = *reinterpret_cast<const uint4*>(x_ + row * p_.x_row_bytes + column * kElement);
      multiply_tile<T>(c, {a.x, b.x, a.y, b.y}, x.x, x.y);
      multiply_tile<T>(c, {a.z, b.z, a.w, b.w}, x.z, x.w);
    }
  }

  // Adds what the warps have, always in the same order.
  __device__ void finish(const float (&c)[4]) {
    const int me = static_cast<int>(threadIdx.x);
    float* mine = sums_[warp()] + lane() / 4 * kTileColumns + lane() % 4 * 2;
    *reinterpret_cast<float2*>(mine) = make_float2(c[0], c[1]);
    if constexpr (kRows > 8)
      *reinterpret_cast<float2*>(mine + 8 * kTileColumns) = make_float2(c[2], c[3]);
    __syncthreads();
    const int output = me / kTileColumns, r = me % kTileColumns;
    const bool mine_to_write = output < min(kOutputs, p_.outputs - first_) && r < p_.rows;
    if (p_.residual.hidden) return add_residual(mine_to_write, output);
    if (!mine_to_write) return;
    float y = total(output, r) + bias(first_ + output);
    if constexpr (kPaired) {
      y = swiglu(y, p_.scale, total(kOutputs + output, r) + bias(p_.outputs + first_ + output));
    } else if (p_.activation == LinearActivation::kReluSquared) {
      y = relu_squared(y, p_.scale);
    }
    store_run<1>(p_.y, p_.y_dtype, r * p_.y_stride + first_ + output, &y);
  }
  // The only row's thread of an output has its place in the stream.
  __device__ void add_residual(bool mine_to_write, int output) {
    const ResidualSum& to = p_.residual;
    float square = 0;
    if (mine_to_write) {
      const int n = first_ + output;
      const float h = fmaf(total(output, 0) + bias(n), to.scale, to.hidden[n]);
      const float normed = h * __ldg(to.weight + n);
      to.hidden[n] = h;
      store_run<1>(to.normed, p_.y_dtype, n, &normed);
      square = h * h;
    }
    for (int d = 16; d > 0; d /= 2) square += __shfl_xor_sync(kAllLanes, square, d);
    __syncthreads();  // nobody needs the sums any more
    if (lane() == 0) sums_[0][warp()] = square;
    __syncthreads();
    if (threadIdx.x != 0) return;
    square = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) square += sums_[0][w];
    to.squares[blockIdx.x] = square;
  }
  __device__ float total(int row, int r) const {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums_[w][row * kTileColumns + r];
    return sum * factor_;
  }
  __device__ float bias(int row) const { return p_.bias ? __ldg(p_.bias + row) : 0; }

  const SkinnyCall& p_;
  Sums& sums_;
  uint4* const queue_;  // of this warp
  char* const x_;
  const int first_;   // output
  float factor_ = 1;  // of the products
};

template <class T, int kRows, bool kPaired>
__global__ void __launch_bounds__(kThreads) skinny_kernel(const __grid_constant__ SkinnyCall p) {
  extern __shared__ __align__(128) char memory[];
  __shared__ typename Product<T, kRows, kPaired>::Sums sums;
  Product<T, kRows, kPaired> product(p, sums, memory);
  product.fill_queue();
  wait_for_predecessor();
  product.load_x();
  release_successor();
  product.multiply();
}

int64_t x_row_bytes(const LinearParams& p) {
  return (p.in_features * kElement + 127) / 128 * 128 + kShift;
}

template <class T, int kRows, bool kPaired>
void launch(const SkinnyCall& call, cudaStream_t stream) {
  constexpr int kOutputs = Product<T, kRows, kPaired>::kOutputs;
  const auto kernel = skinny_kernel<T, kRows, kPaired>;
  const int shared = kQueueBytes + call.rows * call.x_row_bytes;
  reserve_shared("skinny_product", kernel, shared);
  launch_dependent("skinny_product", kernel,
                   dim3(static_cast<unsigned>((call.outputs + kOutputs - 1) / kOutputs)), kThreads,
                   shared, stream, call);
}

// Few tiles would leave multiprocessors with little to wait for.
bool has_small_tiles(int64_t outputs) {
  return outputs < kSmallTilesBelow * multiprocessors("skinny_product");
}

}  // namespace

bool is_skinny(const LinearParams& p) {
  return p.heads == 1 && p.rows <= kMostSkinnyRows && dtype_bytes(p.dtype) == kElement &&
         p.in_features > 0 && rows_aligned(p.x, p.x_head_stride * kElement) &&
         rows_aligned(p.weight, p.in_features * kElement) && p.out_features < (1 << 28) &&
         p.rows * x_row_bytes(p) <= kMostXBytes;
}

bool fuses_norms(const LinearParams& p) {
  return p.rows == 1 && p.dtype == DType::kBFloat16 && is_skinny(p);
}

int64_t residual_parts(int64_t out_features) {
  const int64_t rows = has_small_tiles(out_features) ? 8 : 16;
  return (out_features + rows - 1) / rows;
}

void skinny_product(const LinearParams& p, cudaStream_t stream) {
  REPLAYSSM_CHECK(is_skinny(p), "heads=", p.heads, " rows=", p.rows, " in=", p.in_features);
  if (p.rows == 0 || p.out_features == 0) return;
  const bool paired = p.activation == LinearActivation::kSwiGlu;
  const bool activated = p.activation != LinearActivation::kNone;
  SkinnyCall call{};
  call.x = p.x;
  call.x_stride = p.x_head_stride;
  call.weight = p.weight;
  call.bias = p.bias;
  call.activation = p.activation;
  call.scale = p.scale;
  call.y = activated ? p.activated : p.y;
  call.outputs = static_cast<int>(p.out_features / (paired ? 2 : 1));
  call.y_stride = activated ? call.outputs : p.y_head_stride;
  call.y_dtype = activated || p.residual.hidden ? p.dtype : DType::kFloat32;
  call.rows = static_cast<int>(p.rows);
  call.in = static_cast<int>(p.in_features);
  call.x_row_bytes = static_cast<int>(x_row_bytes(p));
  call.norm = p.norm;
  call.residual = p.residual;
  const bool small = has_small_tiles(call.outputs);
  const auto start = [&]<class T>() {
    if (paired) return launch<T, 16, true>(call, stream);
    small ? launch<T, 8, false>(call, stream) : launch<T, 16, false>(call, stream);
  };
  if (p.dtype == DType::kBFloat16) return start.operator()<Bf16>();
  start.operator()<Fp16>();
}

}  // namespace replayssm::cuda
