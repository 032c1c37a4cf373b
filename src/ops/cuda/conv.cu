// The causal depthwise convolution and SiLU in front of a recurrent layer.
//
// Grid: (sequences, tiles of channels, pieces of kPiece tokens): blocks that run at the same time
// have their weights in common. A thread owns 16 bytes of activations (kVec channels) of a piece.
// It reads the weights while the kernel before still runs, and the inputs of kBatch tokens before
// it uses the first. The first piece stores the kept rows of a prompt behind everything that it
// reads: nobody else reads rows that this overwrites.

#include "ops/cuda/conv.h"

#include <algorithm>

#include "core/check.h"
#include "ops/check_params.h"
#include "ops/cuda/activations.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector_width.h"
#include "replay/cursor.h"

namespace replayssm::cuda {
namespace {

constexpr int kPiece = 16, kMaxThreads = 128;
constexpr int64_t kMaxChannels = 1 << 20;

struct ConvLaunch {
  FastDivide rows;  // of a slot's inputs
  int missing = 0;  // taps of the kernel's kTaps, at its front, that the convolution has not
};

// kVec channels of one sequence. `T` holds activations, `X` the inputs.
template <class T, class X, int kVec, int kTaps, int kBatch>
class ConvColumn {
 public:
  __device__ ConvColumn(const ConvParams& p, const ConvLaunch& launch, int channel)
      : p_(p), launch_(launch), channel_(channel) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      if (j < launch.missing) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) weight_[j][e] = 0;
      } else {
        load_constants<kVec>(p.weight + (j - launch.missing) * p.channels + channel, weight_[j]);
      }
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e) bias_[e] = 0;
    if (p.bias) load_constants<kVec>(p.bias + channel, bias_);
  }

  // A piece of the window of sequence s.
  __device__ void run(int64_t s, int piece, bool last_piece) {
    const int32_t begin = p_.batch.query_start[s], end = p_.batch.query_start[s + 1];
    const int32_t slot = p_.batch.slot[s], window = end - begin;
    const int first = piece * kPiece, stop = last_piece ? window : min(window, first + kPiece);
    if (first >= stop) return;
    x_ = static_cast<const X*>(p_.x) + begin * p_.x_stride + channel_;
    y_ = static_cast<T*>(p_.y) + begin * p_.channels + channel_;
    if (slot < 0) return clear(first, stop);
    parent_ = p_.batch.parent ? p_.batch.parent + begin : nullptr;
    const Cursor& cursor = p_.batch.cursors[slot];
    counter_ = launch_.rows.modulo64(cursor.ring_start + cursor.ring_count);
    inputs_ = static_cast<T*>(p_.inputs) +
              static_cast<int64_t>(slot) * launch_.rows.divisor * p_.channels + channel_;
    const bool prompt = window > p_.batch.ring.max_window;
    float in[kTaps - 1 + kBatch][kVec];
    fetch_before(first, in);
#pragma unroll 1
    for (int i = first; i < stop; i += kBatch) {
      fetch(i, stop, in);
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (i + u >= stop) break;
        if (parent_) fetch_ancestors(i + u, in[u + kTaps - 1]);
        if (!parent_) convolve(in + u, i + u);
        if (!prompt) store_run<T, kVec>(kept(i + u), in[u + kTaps - 1]);
      }
#pragma unroll
      for (int j = 0; j < kTaps - 1; ++j)
#pragma unroll
        for (int e = 0; e < kVec; ++e) in[j][e] = in[j + kBatch][e];
    }
    if (prompt && piece == 0) keep_last(window);
  }

 private:
  static constexpr int kLast = kTaps - 1;

  // Inputs are rounded to the activation type first.
  __device__ void fresh(int i, float* x) const {
    load_run<X, kVec>(x_ + i * p_.x_stride, x);
    if constexpr (!std::is_same_v<T, X>) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) x[e] = to_float(from_float<T>(x[e]));
    }
  }
  // The row of the token `i` behind the last committed one, from -taps + 1 on.
  __device__ T* kept(int i) const {
    const int rows = static_cast<int>(launch_.rows.divisor);
    const int ahead = i < 0 ? i + rows : static_cast<int>(launch_.rows.modulo(i));
    const int row = counter_ + ahead;
    return inputs_ + static_cast<int64_t>(row < rows ? row : row - rows) * p_.channels;
  }

  // The inputs before token i.
  __device__ void fetch_before(int i, float (&in)[kLast + kBatch][kVec]) const {
#pragma unroll
    for (int j = 0; j < kLast; ++j) {
      if (j < launch_.missing || parent_) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) in[j][e] = 0;
      } else if (i == 0) {
        load_run<T, kVec>(kept(j - kLast), in[j]);
      } else {
        fresh(i + j - kLast, in[j]);
      }
    }
  }
  // Those of tokens i, i + 1, ...
  __device__ void fetch(int i, int stop, float (&in)[kLast + kBatch][kVec]) const {
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (i + u < stop) fresh(i + u, in[kLast + u]);
  }

  // Token i of a tree: the taps before its own are its nearest ancestors, then what is kept.
  __device__ void fetch_ancestors(int i, const float (&own)[kVec]) const {
    float in[kTaps][kVec];
    int row = i;
#pragma unroll
    for (int j = kLast; j >= 0; --j) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) in[j][e] = j == kLast ? own[e] : 0;
      if (j < kLast && j >= launch_.missing) {
        row = row >= 0 ? parent_[row] : row - 1;
        if (row >= 0) {
          fresh(row, in[j]);
        } else {
          load_run<T, kVec>(kept(row), in[j]);
        }
      }
    }
    convolve(in, i);
  }

  // Sums in one order, so that a chain is the same with and without parents.
  __device__ void convolve(const float (*in)[kVec], int i) const {
    float y[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      float sum = bias_[e];
#pragma unroll
      for (int j = 0; j < kTaps; ++j)
        if (j >= launch_.missing) sum = fmaf(weight_[j][e], in[j][e], sum);
      y[e] = silu(sum);
    }
    store_run<T, kVec>(y_ + i * p_.channels, y);
  }

  __device__ void keep_last(int window) const {
    const int keep = min(window, kLast - launch_.missing);
#pragma unroll 1
    for (int i = window - keep; i < window; ++i) {
      float x[kVec];
      load_run<X, kVec>(x_ + i * p_.x_stride, x);
      store_run<T, kVec>(kept(i), x);
    }
  }
  __device__ void clear(int first, int stop) const {
    const float zero[kVec] = {};
#pragma unroll 1
    for (int i = first; i < stop; ++i) store_run<T, kVec>(y_ + i * p_.channels, zero);
  }

  const ConvParams& p_;
  const ConvLaunch& launch_;
  const int channel_;
  float weight_[kTaps][kVec], bias_[kVec];
  const X* x_ = nullptr;
  T *y_ = nullptr, *inputs_ = nullptr;
  const int32_t* parent_ = nullptr;
  int counter_ = 0;  // of the window's first token, modulo the rows
};

template <class T, class X, int kVec, int kTaps, int kBatch>
__global__ void __launch_bounds__(kMaxThreads)
    causal_conv_kernel(const __grid_constant__ ConvParams p,
                       const __grid_constant__ ConvLaunch launch) {
  const int channel = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kVec;
  release_successor();
  if (channel >= p.channels) return wait_for_predecessor();
  ConvColumn<T, X, kVec, kTaps, kBatch> column(p, launch, channel);
  wait_for_predecessor();
  column.run(blockIdx.x, static_cast<int>(blockIdx.z), blockIdx.z + 1 == gridDim.z);
}

template <class T, class X, int kVec, int kTaps, int kBatch>
void launch_conv(const ConvParams& p, int64_t longest_window, cudaStream_t stream) {
  const int64_t columns = p.channels / kVec, pieces = (longest_window + kPiece - 1) / kPiece;
  const int64_t wave = multiprocessors("causal_conv");
  // Few columns: small blocks, so that more multiprocessors fetch.
  int threads = kMaxThreads;
  while (threads > 32 && (columns + threads - 1) / threads * p.batch.sequences < wave) threads /= 2;
  ConvLaunch launch;
  launch.rows = FastDivide(
      static_cast<uint32_t>(conv_rows(p.batch.ring.conv_kernel, p.batch.ring.max_window)));
  launch.missing = kTaps - p.batch.ring.conv_kernel;
  const dim3 grid(static_cast<unsigned>(p.batch.sequences),
                  static_cast<unsigned>((columns + threads - 1) / threads),
                  static_cast<unsigned>(std::clamp<int64_t>(pieces, 1, 65535)));
  launch_dependent("causal_conv", causal_conv_kernel<T, X, kVec, kTaps, kBatch>, grid, threads, 0,
                   stream, p, launch);
}

template <class T, class X>
void launch_types(const ConvParams& p, int64_t longest_window, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  const bool vectors = p.channels % kVec == 0 && rows_aligned(p.x, p.x_stride * sizeof(X)) &&
                       rows_aligned(p.weight) && rows_aligned(p.bias) && rows_aligned(p.inputs) &&
                       rows_aligned(p.y);
  if (p.batch.ring.conv_kernel > 4)
    return launch_conv<T, X, 1, kMaxConvKernel, 4>(p, longest_window, stream);
  if (!vectors) return launch_conv<T, X, 1, 4, 4>(p, longest_window, stream);
  if (longest_window > 1) return launch_conv<T, X, kVec, 4, 4>(p, longest_window, stream);
  launch_conv<T, X, kVec, 4, 1>(p, longest_window, stream);
}

template <class T>
void launch_activation(const ConvParams& p, int64_t longest_window, cudaStream_t stream) {
  if (p.x_dtype == DType::kFloat32) return launch_types<T, float>(p, longest_window, stream);
  launch_types<T, T>(p, longest_window, stream);
}

}  // namespace

void causal_conv(const ConvParams& params, int64_t longest_window, cudaStream_t stream) {
  check_params(params);
  if (params.batch.sequences == 0) return;
  if (params.channels > kMaxChannels)
    fail("channels: expected at most ", kMaxChannels, ", got ", params.channels);
  if (params.batch.ring.max_window >= 65536 - kMaxConvKernel) {
    fail("batch.ring.max_window: expected below ", 65536 - kMaxConvKernel, ", got ",
         params.batch.ring.max_window);
  }
  if (longest_window <= 0) longest_window = params.batch.ring.max_window;
  switch (params.activation_dtype) {
    case DType::kBFloat16: return launch_activation<Bf16>(params, longest_window, stream);
    case DType::kFloat16: return launch_activation<Fp16>(params, longest_window, stream);
    default: return launch_activation<float>(params, longest_window, stream);
  }
}

}  // namespace replayssm::cuda
