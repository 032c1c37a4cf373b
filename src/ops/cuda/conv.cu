// The causal depthwise convolution and SiLU in front of a recurrent layer.
//
// Grid: (sequences, tiles of channels, pieces of kPiece tokens): blocks that run at the same time
// have their weights in common. A thread owns 16 bytes of activations (kVec channels) of a piece,
// or of a few sequences that have one token each, and has the inputs of several tokens on their way
// before it uses the first. Weights and kept inputs are read while the kernel before still runs.
// The first piece stores the kept rows of a prompt behind everything that it reads: nobody else
// reads rows that this overwrites.

#include "ops/cuda/conv.h"

#include <algorithm>

#include "core/check.h"
#include "ops/check_params.h"
#include "ops/cuda/activations.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fast_divide.h"
#include "ops/cuda/sequence_plan.cuh"
#include "ops/cuda/vector_width.h"
#include "replay/cursor.h"

namespace replayssm::cuda {
namespace {

constexpr int kPiece = 16, kMaxThreads = 128;
constexpr int64_t kMaxChannels = 1 << 20;

struct ConvLaunch {
  FastDivide rows;    // of a slot's inputs
  int missing = 0;    // taps of the kernel's kTaps, at its front, that the convolution has not
  int per_block = 1;  // sequences of a block
};

// kVec consecutive elements as they came.
template <class X, int kVec>
struct Run {
  static constexpr int kWords = kVec * int(sizeof(X)) / 16;
  uint4 words[kWords];

  __device__ void load(const X* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  __device__ void unpack(float (&x)[kVec]) const {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i)
      widen<X>(reinterpret_cast<const uint32_t*>(words)[i], x + i * 4 / sizeof(X));
  }
};
template <class X>
struct Run<X, 1> {
  X element;
  __device__ void load(const X* from) { element = *from; }
  __device__ void unpack(float (&x)[1]) const { x[0] = to_float(element); }
};

// Where a sequence stands.
struct Place {
  int begin = 0, window = 0, slot = -1;
  int counter = 0;  // of the window's first token, modulo the rows
};

// kVec channels. `T` holds activations, `X` the inputs.
template <class T, class X, int kVec, int kTaps>
class ConvColumn {
 public:
  static constexpr int kSequences = kVec * sizeof(X) <= 16 ? 4 : 2;  // at once, of one token each

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

  // A piece of the window of the s-th sequence.
  __device__ void run(int64_t s, int piece, bool last_piece) const {
    Place w = place(s);
    count_from(w);
    run(w, piece, last_piece);
  }

  // Sequences that most likely have one token each.
  __device__ void run_single(int64_t first, int count) const {
    Place w[kSequences];
    Run<T, kVec> before[kSequences][kLast];
    Run<X, kVec> own[kSequences];
    const auto single = [&](int u) { return w[u].slot >= 0 && w[u].window == 1; };
#pragma unroll
    for (int u = 0; u < kSequences; ++u)
      if (u < count) w[u] = place(first + u);
#pragma unroll
    for (int u = 0; u < kSequences; ++u)
      count_from(w[u]);
#pragma unroll
    for (int u = 0; u < kSequences; ++u)
#pragma unroll
      for (int j = 0; j < kLast; ++j)
        if (single(u) && j >= launch_.missing) before[u][j].load(kept(w[u], j - kLast));
    wait_for_predecessor();
#pragma unroll
    for (int u = 0; u < kSequences; ++u)
      if (single(u)) own[u].load(input(w[u], 0));
#pragma unroll
    for (int u = 0; u < kSequences; ++u) {
      if (!single(u)) continue;
      float in[kTaps][kVec];
#pragma unroll
      for (int j = 0; j < kLast; ++j)
        if (j >= launch_.missing) before[u][j].unpack(in[j]);
      unpack_input(own[u], in[kLast]);
      convolve(in, output(w[u], 0));
      store_run<T, kVec>(kept(w[u], 0), in[kLast]);
    }
#pragma unroll 1
    for (int u = 0; u < count; ++u) {
      const Place other = place(first + u);
      if (other.slot < 0 || other.window > 1) run(first + u, 0, true);
    }
  }

 private:
  static constexpr int kLast = kTaps - 1;
  static constexpr int kBatch = kVec * sizeof(X) <= 16 ? 8 : 4;  // tokens on their way

  // As the plan has it where there is one, counter and all.
  __device__ Place place(int64_t s) const {
    if (p_.batch.plan) {
      const SequencePlan plan = planned_sequence(p_.batch, s);
      return {plan.token, plan.window, plan.slot, plan.conv_first};
    }
    const int begin = p_.batch.query_start[s];
    return {begin, p_.batch.query_start[s + 1] - begin, p_.batch.slot[s]};
  }
  __device__ void count_from(Place& w) const {
    if (p_.batch.plan || w.slot < 0) return;
    const Cursor& cursor = p_.batch.cursors[w.slot];
    w.counter = static_cast<int>(launch_.rows.modulo64(cursor.ring_start + cursor.ring_count));
  }

  __device__ void run(const Place& w, int piece, bool last_piece) const {
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
      Run<X, kVec> own[kBatch];
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

  __device__ const X* input(const Place& w, int i) const {
    return static_cast<const X*>(p_.x) + (w.begin + i) * p_.x_stride + channel_;
  }
  __device__ T* output(const Place& w, int i) const {
    return static_cast<T*>(p_.y) + (w.begin + i) * p_.channels + channel_;
  }
  // The row of the token `i` behind the last committed one, from -taps + 1 on.
  __device__ T* kept(const Place& w, int i) const {
    const int rows = static_cast<int>(launch_.rows.divisor);
    const int row = w.counter + (i < 0 ? i + rows : static_cast<int>(launch_.rows.modulo(i)));
    return static_cast<T*>(p_.inputs) +
           (int64_t{w.slot} * rows + (row < rows ? row : row - rows)) * p_.channels + channel_;
  }

  // Inputs are rounded to the activation type first.
  __device__ static void unpack_input(const Run<X, kVec>& run, float (&x)[kVec]) {
    run.unpack(x);
    if constexpr (!std::is_same_v<T, X>) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) x[e] = to_float(from_float<T>(x[e]));
    }
  }
  __device__ void fresh(const Place& w, int i, float (&x)[kVec]) const {
    Run<X, kVec> run;
    run.load(input(w, i));
    unpack_input(run, x);
  }

  // Token i of a tree: the taps before its own are its nearest ancestors, then what is kept.
  __device__ void fetch_ancestors(const Place& w, const int32_t* parent, int i,
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

  __device__ void keep_last(const Place& w) const {
    const int keep = min(w.window, kLast - launch_.missing);
#pragma unroll 1
    for (int i = w.window - keep; i < w.window; ++i) {
      float x[kVec];
      fresh(w, i, x);
      store_run<T, kVec>(kept(w, i), x);
    }
  }
  __device__ void clear(const Place& w, int first, int stop) const {
    const float zero[kVec] = {};
#pragma unroll 1
    for (int i = first; i < stop; ++i) store_run<T, kVec>(output(w, i), zero);
  }

  const ConvParams& p_;
  const ConvLaunch& launch_;
  const int channel_;
  float weight_[kTaps][kVec], bias_[kVec];
};

template <class T, class X, int kVec, int kTaps, bool kSingle>
__global__ void __launch_bounds__(kMaxThreads, 3)
    causal_conv_kernel(const __grid_constant__ ConvParams p,
                       const __grid_constant__ ConvLaunch launch) {
  release_successor();
  const int channel = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kVec;
  if (channel >= p.channels) return wait_for_predecessor();
  const ConvColumn<T, X, kVec, kTaps> column(p, launch, channel);
  if constexpr (kSingle) {
    const int64_t first = int64_t{blockIdx.x} * launch.per_block;
    column.run_single(first,
                      static_cast<int>(min(p.batch.sequences - first, int64_t{launch.per_block})));
  } else {
    column.run(blockIdx.x, static_cast<int>(blockIdx.z), blockIdx.z + 1 == gridDim.z);
  }
}

template <class T, class X, int kVec, int kTaps, bool kSingle>
void launch_conv(const ConvParams& p, int64_t longest_window, cudaStream_t stream) {
  const int64_t columns = p.channels / kVec, pieces = (longest_window + kPiece - 1) / kPiece;
  const int64_t wave = multiprocessors("causal_conv");
  // Few columns: small blocks, so that more multiprocessors fetch.
  int threads = kMaxThreads;
  const auto tiles = [&] { return (columns + threads - 1) / threads; };
  while (threads > 32 && tiles() * p.batch.sequences < wave) threads /= 2;
  ConvLaunch launch;
  launch.rows = FastDivide(
      static_cast<uint32_t>(conv_rows(p.batch.ring.conv_kernel, p.batch.ring.max_window)));
  launch.missing = kTaps - p.batch.ring.conv_kernel;
  // As many as still fill the multiprocessors.
  if (kSingle) {
    launch.per_block = static_cast<int>(std::clamp<int64_t>(
        tiles() * p.batch.sequences / (3 * wave), 1, ConvColumn<T, X, kVec, kTaps>::kSequences));
  }
  const dim3 grid(
      static_cast<unsigned>((p.batch.sequences + launch.per_block - 1) / launch.per_block),
      static_cast<unsigned>(tiles()), static_cast<unsigned>(std::clamp<int64_t>(pieces, 1, 65535)));
  launch_dependent("causal_conv", causal_conv_kernel<T, X, kVec, kTaps, kSingle>, grid, threads, 0,
                   stream, p, launch);
}

template <class T, class X>
void launch_types(const ConvParams& p, int64_t longest_window, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  const bool vectors = p.channels % kVec == 0 && rows_aligned(p.x, p.x_stride * sizeof(X)) &&
                       rows_aligned(p.weight) && rows_aligned(p.bias) && rows_aligned(p.inputs) &&
                       rows_aligned(p.y);
  if (p.batch.ring.conv_kernel > 4)
    return launch_conv<T, X, 1, kMaxConvKernel, false>(p, longest_window, stream);
  if (!vectors) return launch_conv<T, X, 1, 4, false>(p, longest_window, stream);
  if (longest_window > 1) return launch_conv<T, X, kVec, 4, false>(p, longest_window, stream);
  launch_conv<T, X, kVec, 4, true>(p, longest_window, stream);
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
