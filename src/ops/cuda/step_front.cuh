// What a fused step does before the recurrence: the convolution of the window's channels that a
// block needs, and the scalar gates. Every block reads the inputs of committed tokens and the
// projection, one block stores the window's own inputs.
#pragma once

#include "ops/cuda/scalar_gates.cuh"
#include "ops/cuda/step_block.cuh"

namespace replayssm::cuda {

// Write strength and log decay of a token and head.
struct StepGates {
  float b = 0, g = 0;
};

template <Family kFamily, class Act, int kState>
class LayerFront {
 public:
  using Shared = BlockShared<kFamily, Act, kState>;

  __device__ LayerFront(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                        const Shared& shared)
      : p_(p), launch_(launch), b_(b), shared_(shared) {}

  // Brings to the second-level cache what the kernel before does not write.
  __device__ void prefetch() const {
    const LayerConv& conv = launch_.conv;
#pragma unroll 1
    for (int n = threadIdx.x; n < units(); n += blockDim.x) {
      const int channel = unit(n, 0).channel;
      if (conv.bias) prefetch_line(conv.bias + channel);
      prefetch_line(conv.weight + channel);
#pragma unroll 1
      for (int j = 1; j < taps(); ++j) {
        prefetch_line(conv.weight + j * conv.channels + channel);
        prefetch_line(kept(-j, channel));
      }
    }
    if (kFamily != Family::kKimiDelta && threadIdx.x == 0) {
      prefetch_line(launch_.gates.bias + b_.head);
      prefetch_line(launch_.gates.a + b_.head);
    }
  }

  // All threads of the block call: values, keys and queries of the window to shared memory.
  __device__ void convolve() const {
    const int all = units(), count = all * b_.window;
#pragma unroll 1
    for (int n = threadIdx.x; n < count; n += blockDim.x) {
      const int i = launch_.conv_units.divide(n);
      const Unit u = unit(n - i * all, i);
      if (launch_.projected == DType::kFloat32) {
        convolve<float>(i, u);
      } else {
        convolve<Act>(i, u);
      }
    }
  }

  __device__ StepGates gates(int head, int i) const {
    const ScalarGates& g = launch_.gates;
    const int at = b_.head + head;
    const int64_t from = (b_.token + i) * g.stride + at;
    float strength, decay;
    load_run<1>(g.strength, launch_.projected, from, &strength);
    if constexpr (kFamily == Family::kMamba2) {
      const float b = mamba2_strength(strength, __ldg(g.bias + at), g.min, g.max);
      return {b, b * __ldg(g.a + at)};
    }
    if constexpr (kFamily == Family::kKimiDelta) return {sigmoid(strength)};
    load_run<1>(g.decay, launch_.projected, from, &decay);
    return {sigmoid(strength), delta_log_decay(decay, __ldg(g.bias + at), __ldg(g.a + at))};
  }

 private:
  static constexpr int kElems = kConvUnit;
  static constexpr int kTaps = 4;  // whose inputs are on their way together

  // Some channels of token i of the window.
  struct Unit {
    int channel;
    Act* to;
    bool stores;  // this block stores their inputs
  };
  __device__ Unit unit(int n, int i) const {
    const LayerConv& conv = launch_.conv;
    int at = n * kElems;
    if (at < launch_.layout.columns)
      return {int(conv.v) + b_.head * launch_.head_dim + b_.row + at,
              shared_.value(b_.history + i) + at, true};
    at -= launch_.layout.columns;
    if (at < kState)
      return {int(conv.k) + b_.key_head * kState + at, shared_.key(b_.history + i) + at,
              b_.leads_key};
    at -= kState;
    return {int(conv.q) + b_.key_head * kState + at, shared_.query(i) + at, b_.leads_key};
  }
  __device__ int units() const { return static_cast<int>(launch_.conv_units.divisor); }
  __device__ int taps() const { return p_.batch.ring.conv_kernel; }

  // The input of the token `row` of the window; below 0: behind the last committed one.
  __device__ Act* kept(int row, int channel) const {
    const int rows = static_cast<int>(launch_.conv_rows.divisor);
    int at = b_.conv_first + row;
    at += at < 0 ? rows : at < rows ? 0 : -rows;
    return static_cast<Act*>(launch_.conv.inputs) +
           (static_cast<int64_t>(b_.slot) * rows + at) * launch_.conv.channels + channel;
  }
  // So many generations before token i.
  __device__ int ancestor(int i, int generations) const {
    if (!p_.batch.parent) return i - generations;
    for (; generations > 0; --generations) i = i >= 0 ? p_.batch.parent[b_.token + i] : i - 1;
    return i;
  }

  // As causal_conv adds up. X: the projection's type.
  template <class X>
  __device__ void convolve(int i, const Unit& u) const {
    const LayerConv& conv = launch_.conv;
    float sum[kElems] = {}, x[kElems];
    if (conv.bias) load_constants<kElems>(conv.bias + u.channel, sum);
#pragma unroll 1
    for (int first = 0; first < taps(); first += kTaps) {
      Input<X> in[kTaps];
      float weight[kTaps][kElems];
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        if (first + j >= taps()) break;
        load(ancestor(i, taps() - 1 - first - j), u.channel, in[j]);
        load_constants<kElems>(conv.weight + (first + j) * conv.channels + u.channel, weight[j]);
      }
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        if (first + j >= taps()) break;
        in[j].unpack(x);
#pragma unroll
        for (int e = 0; e < kElems; ++e) sum[e] = fmaf(weight[j][e], x[e], sum[e]);
      }
    }
    if (u.stores) store_run<Act, kElems>(kept(i, u.channel), x);
#pragma unroll
    for (int e = 0; e < kElems; ++e) sum[e] = silu(sum[e]);
    store_run<Act, kElems>(u.to, sum);
  }

  // Inputs as they came: of the projection, or kept.
  template <class X>
  struct Input {
    alignas(16) uint32_t words[sizeof(X) * kElems / 4];
    bool fresh;

    // Rounded to the activation type.
    __device__ void unpack(float (&x)[kElems]) const {
      if (std::is_same_v<X, Act> || !fresh) {
#pragma unroll
        for (int w = 0; w < kElems * int(sizeof(Act)) / 4; ++w)
          widen<Act>(words[w], x + w * (4 / sizeof(Act)));
      } else {
#pragma unroll
        for (int e = 0; e < kElems; ++e)
          x[e] = to_float(from_float<Act>(__uint_as_float(words[e])));
      }
    }
  };
  template <class T>
  __device__ static void load_words(const T* from, uint32_t* words) {
    using W = Word<kElems* int(sizeof(T))>;
    *reinterpret_cast<W*>(words) = *reinterpret_cast<const W*>(from);
  }
  template <class X>
  __device__ void load(int row, int channel, Input<X>& in) const {
    in.fresh = row >= 0;
    const X* const fresh =
        static_cast<const X*>(launch_.conv.x) + (b_.token + row) * launch_.conv.x_stride + channel;
    if constexpr (std::is_same_v<X, Act>) {
      load_words(in.fresh ? fresh : kept(row, channel), in.words);
    } else if (in.fresh) {
      load_words(fresh, in.words);
    } else {
      load_words(kept(row, channel), in.words);
    }
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Shared& shared_;
};

}  // namespace replayssm::cuda
