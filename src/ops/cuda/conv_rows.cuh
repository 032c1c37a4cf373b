// Where the inputs and outputs of a causal convolution lie.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/fast_divide.h"
#include "ops/cuda/sequence_plan.cuh"
#include "replay/cursor.h"

namespace replayssm::cuda {

// kVec consecutive elements as they came.
template <class X, int kVec>
struct ConvRun {
  static constexpr int kBytes = kVec * int(sizeof(X)), kWordBytes = kBytes < 16 ? kBytes : 16;
  static constexpr int kWords = kBytes / kWordBytes;
  using W = Word<kWordBytes>;
  W words[kWords];

  __device__ void load(const X* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const W*>(from)[i];
  }
  // What is not needed again soon.
  __device__ void load_once(const X* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldcs(reinterpret_cast<const W*>(from) + i);
  }
  __device__ void store_once(X* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) __stcs(reinterpret_cast<W*>(to) + i, words[i]);
  }
  __device__ void pack(const float (&x)[kVec]) {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i)
      reinterpret_cast<uint32_t*>(words)[i] = narrow<X>(x + i * 4 / sizeof(X));
  }
  __device__ void unpack(float (&x)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i)
      widen<X>(reinterpret_cast<const uint32_t*>(words)[i], x + i * 4 / sizeof(X));
  }
};
template <class X>
struct ConvRun<X, 1> {
  X element;
  __device__ void load(const X* from) { element = *from; }
  __device__ void unpack(float (&x)[1]) const { x[0] = to_float(element); }
};

// Where a sequence stands.
struct ConvPlace {
  int begin = 0, window = 0, slot = -1;
  int counter = 0;  // of the window's first token, modulo the rows
};

// As the plan has it where there is one, counter and all.
__device__ inline ConvPlace find_conv_place(const SequenceBatch& batch, const FastDivide& rows,
                                            int64_t s) {
  if (batch.plan) {
    const SequencePlan plan = planned_sequence(batch, s);
    return {plan.token, plan.window, plan.slot, plan.conv_first};
  }
  const int begin = batch.query_start[s];
  ConvPlace w{begin, batch.query_start[s + 1] - begin, batch.slot[s]};
  if (w.slot < 0) return w;
  const Cursor& cursor = batch.cursors[w.slot];
  w.counter = static_cast<int>(rows.modulo64(cursor.ring_start + cursor.ring_count));
  return w;
}

// kVec channels from `channel` on. `T` holds activations, `X` the inputs; rows: of a slot.
template <class T, class X, int kVec>
class ConvRows {
 public:
  __device__ ConvRows(const ConvParams& p, const FastDivide& rows, int channel)
      : p_(p), rows_(rows), channel_(channel) {}

  __device__ const X* input(const ConvPlace& w, int i) const {
    return static_cast<const X*>(p_.x) + (w.begin + i) * p_.x_stride + channel_;
  }
  __device__ T* output(const ConvPlace& w, int i) const {
    return static_cast<T*>(p_.y) + (w.begin + i) * p_.channels + channel_;
  }
  // The row of the token `i` behind the last committed one, from -taps + 1 on.
  __device__ T* kept(const ConvPlace& w, int i) const {
    const int rows = static_cast<int>(rows_.divisor);
    const int row = w.counter + (i < 0 ? i + rows : static_cast<int>(rows_.modulo(i)));
    return static_cast<T*>(p_.inputs) +
           (int64_t{w.slot} * rows + (row < rows ? row : row - rows)) * p_.channels + channel_;
  }

  // Inputs are rounded to the activation type first.
  __device__ static void unpack_input(const ConvRun<X, kVec>& run, float (&x)[kVec]) {
    run.unpack(x);
    if constexpr (!std::is_same_v<T, X>) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) x[e] = to_float(from_float<T>(x[e]));
    }
  }
  __device__ void fresh(const ConvPlace& w, int i, float (&x)[kVec]) const {
    ConvRun<X, kVec> run;
    run.load(input(w, i));
    unpack_input(run, x);
  }

  __device__ void keep_last(const ConvPlace& w) const {
    const int keep = min(w.window, p_.batch.ring.conv_kernel - 1);
#pragma unroll 1
    for (int i = w.window - keep; i < w.window; ++i) {
      float x[kVec];
      fresh(w, i, x);
      store_run<T, kVec>(kept(w, i), x);
    }
  }
  __device__ void clear(const ConvPlace& w, int first, int stop) const {
    const float zero[kVec] = {};
#pragma unroll 1
    for (int i = first; i < stop; ++i) store_run<T, kVec>(output(w, i), zero);
  }

 private:
  const ConvParams& p_;
  const FastDivide& rows_;
  const int channel_;
};

}  // namespace replayssm::cuda
