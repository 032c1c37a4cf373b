// What a fused step does before the recurrence: the convolution of the window's channels that a
// block needs, and the scalar gates. Every block reads the inputs of committed tokens and the
// projection, one block stores the window's own inputs.
#pragma once

#include "ops/cuda/scalar_gates.cuh"
#include "ops/cuda/step_block.cuh"

namespace replayssm::cuda {

template <Family kFamily, class Act, int kState>
class LayerFront {
 public:
  using Shared = BlockShared<kFamily, Act, kState>;

  __device__ LayerFront(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                        const Shared& shared)
      : p_(p), launch_(launch), b_(b), shared_(shared) {}

  // All threads of the block call: values, keys and queries of the window to shared memory. Waits
  // for the kernel before as soon as what that one does not write is on its way.
  __device__ void convolve() const {
    if (kFamily != Family::kKimiDelta && threadIdx.x == 0) {
      prefetch_line(launch_.gates.bias + b_.head);
      prefetch_line(launch_.gates.a + b_.head);
    }
    bool waited = false;
#pragma unroll 1
    for (int n = threadIdx.x; n < launch_.conv_units || !waited; n += blockDim.x) {
      const bool exists = n < launch_.conv_units;
      const Unit u = unit(n);
      Taps taps;
      if (exists) load(u, taps);
      if (!waited) wait_for_predecessor();
      waited = true;
      if (!exists) continue;
      if (launch_.projected == DType::kFloat32) {
        convolve<float>(u, taps);
      } else {
        convolve<Act>(u, taps);
      }
    }
  }

  // Strengths and log decays of the window to shared memory. The last threads do: the first have
  // more to convolve.
  __device__ void form_gates() const {
    const int heads = launch_.config.heads;
#pragma unroll 1
    for (int n = blockDim.x - 1 - threadIdx.x; n < heads * b_.window; n += blockDim.x) {
      const int i = n / heads, head = n - i * heads, j = b_.history + i;
      const ScalarGates& g = launch_.gates;
      const int64_t from = (b_.token + i) * g.stride + b_.head + head;
      float strength, decay = 0;
      load_run<1>(g.strength, launch_.projected, from, &strength);
      if constexpr (kFamily == Family::kGatedDelta)
        load_run<1>(g.decay, launch_.projected, from, &decay);
      if constexpr (kFamily == Family::kKimiDelta) {
        shared_.strengths(head)[j] = sigmoid(strength);
      } else {
        const float bias = __ldg(g.bias + b_.head + head), a = __ldg(g.a + b_.head + head);
        const bool mamba = kFamily == Family::kMamba2;
        const float b = mamba ? mamba2_strength(strength, bias, g.min, g.max) : sigmoid(strength);
        shared_.strengths(head)[j] = b;
        shared_.log_decays(head)[j] = mamba ? b * a : delta_log_decay(decay, bias, a);
      }
    }
  }

 private:
  static constexpr int kElems = kConvUnit, kTaps = kFusedTaps, kLast = kTaps - 1;

  // kElems inputs.
  struct Run {
    Word<kElems* int(sizeof(Act))> word;

    __device__ void unpack(float (&x)[kElems]) const {
#pragma unroll
      for (int w = 0; w < kElems * int(sizeof(Act)) / 4; ++w)
        widen<Act>(reinterpret_cast<const uint32_t*>(&word)[w], x + w * (4 / sizeof(Act)));
    }
  };

  // Some channels, and where they go.
  struct Unit {
    int channel;
    Act* to;      // of the window's first token
    int stride;   // to the next token's
    bool stores;  // this block stores their inputs
  };
  __device__ Unit unit(int n) const {
    const LayerConv& conv = launch_.conv;
    int at = n * kElems;
    if (at < launch_.layout.columns)
      return {int(conv.v) + b_.head * launch_.head_dim + b_.row + at,
              shared_.value(b_.history) + at, shared_.value_stride(), b_.part == 0};
    at -= launch_.layout.columns;
    const bool query = at >= kState;
    if (query) at -= kState;
    return {int(query ? conv.q : conv.k) + b_.key_head * kState + at,
            (query ? shared_.query(0) : shared_.key(b_.history)) + at, Shared::kKeyStride,
            b_.leads_key};
  }

  // What no kernel of the step writes: weights, bias, the inputs before the window.
  struct Taps {
    float weight[kTaps][kElems], bias[kElems];
    Run in[kTaps];
    Act* kept;  // these channels of the slot's first row
  };
  __device__ void load(const Unit& u, Taps& taps) const {
    const LayerConv& conv = launch_.conv;
    taps.kept = static_cast<Act*>(conv.inputs) + u.channel +
                static_cast<int64_t>(b_.slot) * (rows() * channels());
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      load_constants<kElems>(conv.weight + u.channel + j * channels(), taps.weight[j]);
      if (j < kLast) taps.in[j] = kept(taps, j - kLast);
    }
#pragma unroll
    for (int e = 0; e < kElems; ++e) taps.bias[e] = 0;
    if (conv.bias) load_constants<kElems>(conv.bias + u.channel, taps.bias);
  }
  __device__ int rows() const { return static_cast<int>(launch_.conv_rows.divisor); }
  __device__ int channels() const { return static_cast<int>(launch_.conv.channels); }

  // The input of the token `row` of the window; below 0: behind the last committed one.
  __device__ Run& kept(const Taps& taps, int row) const {
    int at = b_.conv_first + row;
    at += at < 0 ? rows() : at < rows() ? 0 : -rows();
    return *reinterpret_cast<Run*>(taps.kept + at * channels());
  }
  // Rounded to the activation type. X: the projection's.
  template <class X>
  __device__ Run fresh(int i, int channel) const {
    const X* const from =
        static_cast<const X*>(launch_.conv.x) + (b_.token + i) * launch_.conv.x_stride + channel;
    if constexpr (std::is_same_v<X, Act>) return *reinterpret_cast<const Run*>(from);
    Run run;
    float x[kElems];
    load_elements<X, kElems>(from, x);
    store_elements<Act, kElems>(&run, x);
    return run;
  }

  // As causal_conv adds up.
  template <class X>
  __device__ void convolve(const Unit& u, Taps& taps) const {
    Run(&in)[kTaps] = taps.in;
    Run next = fresh<X>(0, u.channel);
    Act* to = u.to;
#pragma unroll 1
    for (int i = 0; i < b_.window; ++i, to += u.stride) {
      in[kLast] = next;
      if (i + 1 < b_.window) next = fresh<X>(i + 1, u.channel);
      if (p_.batch.parent) load_ancestors<X>(i, u.channel, taps);
      float y[kElems];
#pragma unroll
      for (int e = 0; e < kElems; ++e) y[e] = taps.bias[e];
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        float x[kElems];
        in[j].unpack(x);
#pragma unroll
        for (int e = 0; e < kElems; ++e) y[e] = fmaf(taps.weight[j][e], x[e], y[e]);
      }
#pragma unroll
      for (int e = 0; e < kElems; ++e) y[e] = silu(y[e]);
      store_elements<Act, kElems>(to, y);
      if (u.stores) kept(taps, i) = in[kLast];
#pragma unroll
      for (int j = 0; j < kLast; ++j) in[j] = in[j + 1];
    }
  }
  // Token i of a tree: the taps before its own are its nearest ancestors, then what is kept.
  template <class X>
  __device__ void load_ancestors(int i, int channel, Taps& taps) const {
#pragma unroll
    for (int j = kLast - 1; j >= 0; --j) {
      i = i >= 0 ? p_.batch.parent[b_.token + i] : i - 1;
      taps.in[j] = i >= 0 ? fresh<X>(i, channel) : kept(taps, i);
    }
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Shared& shared_;
};

}  // namespace replayssm::cuda
