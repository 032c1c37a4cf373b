// The causal depthwise convolution and SiLU in front of a recurrent layer.
//
// Grid: (sequences, tiles of channels, pieces of kPiece tokens): blocks that run at the same time
// have their weights in common. A thread owns 16 bytes of activations (kVec channels) of a piece
// and has the inputs of several tokens on their way before it uses the first. Weights and kept
// inputs are read while the kernel before still runs. The first piece stores the kept rows of a
// prompt behind everything that it reads: nobody else reads rows that this overwrites.
//
// Steps of one token have a kernel of their own (conv_tokens.cu).

#include "ops/cuda/conv.h"

#include <algorithm>

#include "core/check.h"
#include "ops/check_params.h"
#include "ops/cuda/conv_rows.cuh"
#include "ops/cuda/conv_tokens.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {
namespace {

constexpr int kPiece = 16, kMaxThreads = 128;
constexpr int64_t kMaxChannels = 1 << 20;

struct ConvLaunch {
  FastDivide rows;  // of a slot's inputs
  int missing = 0;  // taps of the kernel's kTaps, at its front, that the convolution has not
};

template <class T, class X, int kVec, int kTaps>
class ConvColumn : ConvRows<T, X, kVec> {
 public:
  __device__ ConvColumn(const ConvParams& p, const ConvLaunch& launch, int channel)
      : ConvRows<T, X, kVec>(p, launch.rows, channel), p_(p), launch_(launch) {
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

  // A piece of a window.
  __device__ void run(const ConvPlace& w, int piece, bool last_piece) const {
    const int first = piece * kPiece, stop = last_piece ? w.window : min(w.window, first + kPiece);
    const bool works = w.slot >= 0 && first < stop;
    const int32_t* parent = p_.batch.parent ? p_.batch.parent + w.begin : nullptr;
    const bool prompt = w.window > p_.batch.ring.max_window;
    float in[kTaps][kVec] = {};
#pragma unroll
    for (int j = 0; j < kLast; ++j)
      if (works && first == 0 && !parent && j >= launch_.missing)
        load_run<T, kVec>(kept(w, j - kLast), in[j]);
    wait_for_predecessor();
    if (w.slot < 0) clear(w, first, stop);
    if (!works) return;
#pragma unroll
    for (int j = 0; j < kLast; ++j)
      if (first > 0 && !parent && j >= launch_.missing) fresh(w, first + j - kLast, in[j]);
#pragma unroll 1
    for (int i = first; i < stop; i += kBatch) {
      ConvRun<X, kVec> own[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u)
        if (i + u < stop) own[u].load(input(w, i + u));
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (i + u >= stop) break;
        unpack_input(own[u], in[kLast]);
        if (parent) fetch_ancestors(w, parent, i + u, in);
        convolve(in, output(w, i + u));
        if (!prompt) store_run<T, kVec>(kept(w, i + u), in[kLast]);
#pragma unroll
        for (int j = 0; j < kLast; ++j)
#pragma unroll
          for (int e = 0; e < kVec; ++e) in[j][e] = in[j + 1][e];
      }
    }
    if (prompt && piece == 0) keep_last(w);
  }

 private:
  using Base = ConvRows<T, X, kVec>;
  using Base::clear;
  using Base::fresh;
  using Base::input;
  using Base::keep_last;
  using Base::kept;
  using Base::output;
  using Base::unpack_input;
  static constexpr int kLast = kTaps - 1;
  static constexpr int kBatch = kVec * sizeof(X) <= 16 ? 8 : 4;  // tokens on their way

  // Token i of a tree: the taps before its own are its nearest ancestors, then what is kept.
  __device__ void fetch_ancestors(const ConvPlace& w, const int32_t* parent, int i,
                                  float (&in)[kTaps][kVec]) const {
    int row = i;
#pragma unroll
    for (int j = kLast - 1; j >= 0; --j) {
      if (j < launch_.missing) continue;
      row = row >= 0 ? parent[row] : row - 1;
      if (row >= 0) {
        fresh(w, row, in[j]);
      } else {
        load_run<T, kVec>(kept(w, row), in[j]);
      }
    }
  }

  // Sums in one order, so that a chain is the same with and without parents.
  __device__ void convolve(const float (&in)[kTaps][kVec], T* to) const {
    float y[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      float sum = bias_[e];
#pragma unroll
      for (int j = 0; j < kTaps; ++j)
        if (j >= launch_.missing) sum = fmaf(weight_[j][e], in[j][e], sum);
      y[e] = silu(sum);
    }
    store_run<T, kVec>(to, y);
  }

  const ConvParams& p_;
  const ConvLaunch& launch_;
  float weight_[kTaps][kVec], bias_[kVec];
};

template <class T, class X, int kVec, int kTaps>
__global__ void __launch_bounds__(kMaxThreads, 3)
    causal_conv_kernel(const __grid_constant__ ConvParams p,
                       const __grid_constant__ ConvLaunch launch) {
  release_successor();
  const int channel = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kVec;
  if (channel >= p.channels) return wait_for_predecessor();
  const ConvPlace w = find_conv_place(p.batch, launch.rows, blockIdx.x);
  const ConvColumn<T, X, kVec, kTaps> column(p, launch, channel);
  column.run(w, static_cast<int>(blockIdx.z), blockIdx.z + 1 == gridDim.z);
}

ConvLaunch launch_of(const ConvParams& p, int taps) {
  const RingConfig& ring = p.batch.ring;
  const int64_t rows = conv_rows(ring.conv_kernel, ring.max_window);
  return {FastDivide(static_cast<uint32_t>(rows)), taps - ring.conv_kernel};
}

template <class T, class X, int kVec, int kTaps>
void launch_conv(const ConvParams& p, int64_t longest_window, cudaStream_t stream) {
  const int64_t columns = p.channels / kVec, pieces = (longest_window + kPiece - 1) / kPiece;
  const int64_t wave = multiprocessors("causal_conv");
  // Few columns: small blocks, so that more multiprocessors fetch.
  int threads = kMaxThreads;
  const auto tiles = [&] { return (columns + threads - 1) / threads; };
  while (threads > 32 && tiles() * p.batch.sequences < wave) threads /= 2;
  const dim3 grid(static_cast<unsigned>(p.batch.sequences), static_cast<unsigned>(tiles()),
                  static_cast<unsigned>(std::clamp<int64_t>(pieces, 1, 65535)));
  launch_dependent("causal_conv", causal_conv_kernel<T, X, kVec, kTaps>, grid, threads, 0, stream,
                   p, launch_of(p, kTaps));
}

template <class T, class X>
void launch_types(const ConvParams& p, int64_t longest_window, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  const bool vectors = p.channels % kVec == 0 && rows_aligned(p.x, p.x_stride * sizeof(X)) &&
                       rows_aligned(p.weight) && rows_aligned(p.bias) && rows_aligned(p.inputs) &&
                       rows_aligned(p.y);
  if (p.batch.ring.conv_kernel > 4)
    return launch_conv<T, X, 1, kMaxConvKernel>(p, longest_window, stream);
  if (!vectors) return launch_conv<T, X, 1, 4>(p, longest_window, stream);
  launch_conv<T, X, kVec, 4>(p, longest_window, stream);
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
  if (longest_window == 1 && conv_tokens(params, stream)) return;
  switch (params.activation_dtype) {
    case DType::kBFloat16: return launch_activation<Bf16>(params, longest_window, stream);
    case DType::kFloat16: return launch_activation<Fp16>(params, longest_window, stream);
    default: return launch_activation<float>(params, longest_window, stream);
  }
}

}  // namespace replayssm::cuda
