// The convolution of steps of one token a sequence: three kept inputs and one new one a channel.
//
// Threads do little but wait, first for the plan and then for inputs, so there are as many as find
// room: a thread has kVec channels of one sequence and all its loads on their way before it uses
// any, in 40 registers. A warp has 128 channels, the warps of a block the same ones of other
// sequences, so that they share the lines of weights that the block fetches. Weights and kept
// inputs are read while the kernel before still runs.

#include "ops/cuda/conv_tokens.h"

#include "ops/cuda/conv_rows.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {
namespace {

constexpr int kTaps = 4, kLast = kTaps - 1, kVec = 4, kLanes = 32, kSequences = 4;
constexpr int kThreads = kLanes * kSequences;

struct TokenLaunch {
  FastDivide rows;                      // of a slot; there are less than 2^32, of 256 bytes or more
  uint32_t row_bytes = 0, x_bytes = 0;  // from one row of activations, of inputs, to the next
};

struct TokenWeights {
  float tap[kTaps][kVec], bias[kVec] = {};

  __device__ TokenWeights(const ConvParams& p, uint32_t channel, bool has_bias) {
    const float* from = p.weight + channel;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      load_constants<kVec>(from, tap[j]);
      from += p.channels;
    }
    if (has_bias) load_constants<kVec>(p.bias + channel, bias);
  }

  // The taps in one order, as for windows.
  template <class T>
  __device__ void convolve(const float (&in)[kTaps][kVec], T* to) const {
    float y[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      float sum = bias[e];
#pragma unroll
      for (int j = 0; j < kTaps; ++j) sum = fmaf(tap[j][e], in[j][e], sum);
      y[e] = silu(sum);
    }
    store_run<T, kVec>(to, y);
  }
};

template <class P>
__device__ inline P* bytes_behind(P* from, uint64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
  return reinterpret_cast<P*>(reinterpret_cast<Byte*>(from) + bytes);
}

// A window of one token.
template <class T, class X>
__device__ inline void take_token(const ConvParams& p, const TokenLaunch& launch,
                                  const ConvPlace& w, uint32_t channel,
                                  const TokenWeights& weights) {
  T* const inputs = static_cast<T*>(p.inputs) + channel;
  const uint32_t rows = launch.rows.divisor,
                 mine_row = static_cast<uint32_t>(w.slot) * rows + static_cast<uint32_t>(w.counter);
  ConvRun<T, kVec> before[kLast], mine;
#pragma unroll
  for (int j = 0; j < kLast; ++j) {
    const int back = kLast - j;
    const uint32_t row = mine_row - back + (w.counter < back ? rows : 0);
    before[j].load_once(bytes_behind(inputs, uint64_t{row} * launch.row_bytes));
  }
  wait_for_predecessor();
  const auto token = static_cast<uint64_t>(w.begin);
  ConvRun<X, kVec> own;
  own.load(bytes_behind(static_cast<const X*>(p.x) + channel, token * launch.x_bytes));
  float in[kTaps][kVec];
#pragma unroll
  for (int j = 0; j < kLast; ++j) before[j].unpack(in[j]);
  own.unpack(in[kLast]);
  mine.pack(in[kLast]);
  mine.unpack(in[kLast]);
  weights.convolve(in, bytes_behind(static_cast<T*>(p.y) + channel, token * launch.row_bytes));
  mine.store_once(bytes_behind(inputs, uint64_t{mine_row} * launch.row_bytes));
}

// Any other window, a channel, token and tap at a time: what few registers allow.
template <class T, class X>
__device__ inline void take_window(const ConvParams& p, const TokenLaunch& launch,
                                   const ConvPlace& w, int channel) {
  const ConvRows<T, X, 1> rows(p, launch.rows, channel);
  if (w.slot < 0) return rows.clear(w, 0, w.window);
  const bool prompt = w.window > p.batch.ring.max_window;
#pragma unroll 1
  for (int i = 0; i < w.window; ++i) {
    float sum = p.bias ? p.bias[channel] : 0.0f, in[1];
#pragma unroll 1
    for (int j = 0; j < kTaps; ++j) {
      int row = i;
#pragma unroll 1
      for (int k = j; k < kLast; ++k)
        row = p.batch.parent && row >= 0 ? p.batch.parent[w.begin + row] : row - 1;
      if (row >= 0) {
        rows.fresh(w, row, in);
      } else {
        in[0] = to_float(*rows.kept(w, row));
      }
      sum = fmaf(p.weight[j * p.channels + channel], in[0], sum);
    }
    *rows.output(w, i) = from_float<T>(silu(sum));
    if (!prompt) *rows.kept(w, i) = from_float<T>(in[0]);
  }
  if (prompt) rows.keep_last(w);
}

// kBias: there is one.
template <class T, class X, bool kBias>
__global__ void __launch_bounds__(kThreads, 10)
    conv_tokens_kernel(const __grid_constant__ ConvParams p,
                       const __grid_constant__ TokenLaunch launch) {
  release_successor();
  // What a warp has in common: the compiler is told.
  const uint32_t warp = __shfl_sync(kAllLanes, threadIdx.x / kLanes, 0),
                 s = blockIdx.x * kSequences + warp,
                 channel = (blockIdx.y * kLanes + threadIdx.x % kLanes) * kVec;
  if (s >= p.batch.sequences) return wait_for_predecessor();
  const ConvPlace w = find_conv_place(p.batch, launch.rows, s);
  const TokenWeights weights(p, channel, kBias);
  if (__all_sync(kAllLanes, w.slot >= 0 && w.window == 1))
    return take_token<T, X>(p, launch, w, channel, weights);
  wait_for_predecessor();
#pragma unroll 1
  for (int e = 0; e < kVec; ++e) take_window<T, X>(p, launch, w, static_cast<int>(channel) + e);
}

template <class T, class X>
bool launch_types(const ConvParams& p, cudaStream_t stream) {
  constexpr int64_t kTile = int64_t{kLanes} * kVec;
  const RingConfig& ring = p.batch.ring;
  const int64_t rows = conv_rows(ring.conv_kernel, ring.max_window),
                row_bytes = p.channels * int64_t{sizeof(T)},
                x_bytes = p.x_stride * int64_t{sizeof(X)};
  const bool fits = p.channels % kTile == 0 && rows_aligned(p.x, x_bytes) &&
                    rows_aligned(p.weight) && rows_aligned(p.bias) && rows_aligned(p.inputs) &&
                    rows_aligned(p.y) && x_bytes <= UINT32_MAX && p.batch.sequences <= INT32_MAX;
  if (!fits) return false;
  const TokenLaunch launch{FastDivide(static_cast<uint32_t>(rows)),
                           static_cast<uint32_t>(row_bytes), static_cast<uint32_t>(x_bytes)};
  const dim3 grid(static_cast<unsigned>((p.batch.sequences + kSequences - 1) / kSequences),
                  static_cast<unsigned>(p.channels / kTile));
  launch_dependent("causal_conv",
                   p.bias ? conv_tokens_kernel<T, X, true> : conv_tokens_kernel<T, X, false>, grid,
                   kThreads, 0, stream, p, launch);
  return true;
}

template <class T>
bool launch_activation(const ConvParams& p, cudaStream_t stream) {
  return p.x_dtype == DType::kFloat32 ? launch_types<T, float>(p, stream)
                                      : launch_types<T, T>(p, stream);
}

}  // namespace

bool conv_tokens(const ConvParams& p, cudaStream_t stream) {
  if (p.batch.ring.conv_kernel != kTaps) return false;
  switch (p.activation_dtype) {
    case DType::kBFloat16: return launch_activation<Bf16>(p, stream);
    case DType::kFloat16: return launch_activation<Fp16>(p, stream);
    default: return launch_activation<float>(p, stream);
  }
}

}  // namespace replayssm::cuda
