// Preparation of Mamba-2's single tokens: a thread per eight columns of the block's heads.
#pragma once

#include "ops/cuda/step_prepare_rows.cuh"
#include "ops/cuda/step_products.cuh"

namespace replayssm::cuda {

template <class Source, int kState>
class Mamba2Preparation : PreparedRows<Family::kMamba2, Source, kState> {
  using Base = PreparedRows<Family::kMamba2, Source, kState>;

 public:
  using Base::Base;
  using typename Base::Shared;

  static int shared_bytes(const StepLaunch& launch) {
    const LaunchConfig& config = launch.config;
    return Base::kKeyBytes + kRows * config.heads * launch.head_dim * int(sizeof(Act)) +
           (config.preparing * kRows + config.heads * kWeightStride) * int(sizeof(float));
  }

  __device__ void run() const {
    Gates gates[kHeads];
    fetch(gates);
    __syncthreads();
    multiply();
    weigh(gates);
    if (context_.warp() == warps() - 1) keep_query();
    __syncthreads();
    mix();
  }

 private:
  using Base::b_, Base::context_, Base::handed_, Base::launch_, Base::p_, Base::rows_;
  using Base::heads, Base::input, Base::move, Base::ring_row, Base::warps;
  using Base::kHalf, Base::kKeyStride, Base::kRows, Base::kUnit;
  using typename Base::Act;
  using typename Base::Gates;

  static constexpr int kHeads = 2;  // of half a warp, a lane per row
  static constexpr int kWeightStride = kRows + 4;

  __device__ int columns() const { return heads() * launch_.head_dim; }
  __device__ Act* keys() const { return reinterpret_cast<Act*>(Base::memory_); }
  __device__ Act* query() const { return keys() + kRows * kKeyStride; }
  __device__ Act* values() const { return query() + kKeyStride; }
  __device__ float* weights() const {
    return reinterpret_cast<float*>(values() + kRows * columns());
  }
  // Of each key with the query, this warp's.
  __device__ float* products() const {
    return weights() + heads() * kWeightStride + context_.warp() * kRows;
  }
  __device__ static int lane() { return threadIdx.x % kHalf; }
  __device__ static int half() { return threadIdx.x / kHalf; }
  __device__ static int halves() { return blockDim.x / kHalf; }
  // Calls fn(at) with the columns of this thread, eight at a time.
  template <class Fn>
  __device__ void for_columns(Fn&& fn) const {
#pragma unroll 1
    for (int at = threadIdx.x * kUnit; at < columns(); at += blockDim.x * kUnit) fn(at);
  }
  // Calls fn(n, head) with the heads of this half warp; all lanes call.
  template <class Fn>
  __device__ void for_heads(Fn&& fn) const {
#pragma unroll
    for (int n = 0; n < kHeads; ++n) fn(n, n * halves() + half());
  }

  // Rows to shared memory, gates to registers.
  __device__ void fetch(Gates (&gates)[kHeads]) const {
    const int unit = lane() * kUnit;
#pragma unroll 1
    for (int u = 1 + half(); u < rows_; u += halves())
      copy_async_16(keys() + u * kKeyStride + unit, Base::ring_key(ring_row(u)) + unit);
    for_columns([&](int at) {
#pragma unroll 2
      for (int u = 1; u < rows_; ++u)
        copy_async_16(values() + u * columns() + at, Base::ring_value(ring_row(u)) + at);
    });
    for_heads([&](int n, int head) {
      if (head < heads() && lane() > 0 && lane() < rows_) gates[n] = Base::gates(head, lane());
    });

    wait_for_predecessor();
    if (half() == 0) {
      const int at = b_.key_head * kState + unit;
      copy_async_16(keys() + unit, input(p_.k, p_.k_stride, at));
      copy_async_16(query() + unit, input(p_.q, p_.q_stride, at));
    }
    for_columns([&](int at) {
      copy_async_16(values() + at, input(p_.v, p_.v_stride, b_.head * launch_.head_dim + at));
    });
    for_heads([&](int n, int head) {
      if (head < heads() && lane() == 0) gates[n] = Base::gates(head, 0);
    });
    copy_async_wait_all();
  }

  // Products of the keys with the query, on the tensor cores. Rows that there are not give
  // anything.
  __device__ void multiply() const {
    const int lane = context_.lane();
    const Act* const a_row = keys() + lane % 16 * kKeyStride + lane / 16 * 8;
    const Act* const b_row = query() + lane / 8 * 8;
    float sum[4];
    multiply_row_tile<Act, kState>(a_row, b_row, sum);
    if (lane % 4 == 0) {
      products()[lane / 4] = sum[0];
      products()[lane / 4 + 8] = sum[2];
    }
    __syncwarp();
  }

  // c_j = b_j e^{D_j} k_j . q.
  __device__ void weigh(const Gates (&gates)[kHeads]) const {
    for_heads([&](int n, int head) {
      float all;
      const float newer = sum_before(gates[n].decay, all);
      if (head >= heads()) return;
      float c = lane() < rows_ ? gates[n].strength * expf(newer) * products()[lane()] : 0.0f;
      if (lane() == 0) {
        c += context_.skip(head);
        handed_.output_scale(head, 0) = expf(all);
        Base::append(head, gates[n]);
      }
      weights()[head * kWeightStride + lane()] = c;
    });
  }
  // Of half a warp's numbers the sum of those of the lanes before each; all: of all of them.
  __device__ static float sum_before(float x, float& all) {
    float sum = x;
#pragma unroll
    for (int d = 1; d < kHalf; d *= 2) {
      const float other = __shfl_up_sync(kAllLanes, sum, d);
      if (lane() >= d) sum += other;
    }
    all = __shfl_sync(kAllLanes, sum, kHalf - 1, kHalf);
    const float before = __shfl_up_sync(kAllLanes, sum, 1);
    return lane() == 0 ? 0.0f : before;
  }

  // The heads share it.
  __device__ void keep_query() const {
    float t[Base::kElems];
    load_elements<Act, Base::kElems>(query() + context_.lane() * Base::kElems, t);
    typename Base::Target(context_).keep(0, 0, t);
  }

  // Outputs so far; the window goes to the ring.
  __device__ void mix() const {
    const int window = ring_row(0);
    for_columns([&](int at) {
      const float* const c = weights() + launch_.passes.divide(at / kPassRows) * kWeightStride;
      float o[kUnit] = {};
#pragma unroll 4
      for (int u = 0; u < rows_; ++u) {
        float v[kUnit];
        load_elements<Act, kUnit>(values() + u * columns() + at, v);
#pragma unroll
        for (int e = 0; e < kUnit; ++e) o[e] = fmaf(c[u], v[e], o[e]);
      }
#pragma unroll
      for (int e = 0; e < kUnit; e += 4)
        store_elements<float, 4>(handed_.outputs(0) + at + e, o + e);
      move(Base::ring_value(window) + at, values() + at);
    });
    if (b_.owns_key && half() == 0)
      move(Base::ring_key(window) + lane() * kUnit, keys() + lane() * kUnit);
  }
};

}  // namespace replayssm::cuda
