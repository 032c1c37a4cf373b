// Preparation of Kimi Delta's single tokens: a warp per head, which shares nothing. Lane u has what
// there is once of row u.
#pragma once

#include "ops/cuda/step_gates.cuh"
#include "ops/cuda/step_prepare_rows.cuh"

namespace replayssm::cuda {

template <class Source, int kState>
class KimiPreparation : PreparedRows<Family::kKimiDelta, Source, kState> {
  using Base = PreparedRows<Family::kKimiDelta, Source, kState>;

 public:
  using Base::Base;
  using typename Base::Shared;

  static int shared_bytes(const StepLaunch& launch) { return launch.config.preparing * kWarpBytes; }

  __device__ void run() const {
#pragma unroll 1
    for (int head = context_.warp(); head < Base::heads(); head += Base::warps()) {
      const Gates gates = fetch(head);
      __syncwarp();
      mix(head, walk(head, gates.strength));
      append(head, gates);
      __syncwarp();
    }
  }

 private:
  using Base::b_, Base::context_, Base::handed_, Base::launch_, Base::p_, Base::rows_;
  using Base::input, Base::move, Base::ring_row;
  using Base::kElems, Base::kHalf, Base::kKeyStride, Base::kRows, Base::kUnit;
  using typename Base::Act;
  using typename Base::Gates;

  static constexpr int kRowsBytes = kRows * kState * int(sizeof(Act));
  static constexpr int kWarpBytes = Base::kKeyBytes + 2 * kRowsBytes;

  __device__ Act* keys() const {
    return reinterpret_cast<Act*>(Base::memory_ + context_.warp() * kWarpBytes);
  }
  __device__ Act* query() const { return keys() + kRows * kKeyStride; }
  __device__ Act* values() const { return query() + kKeyStride; }
  __device__ Act* raw_gates() const { return values() + kRows * kState; }
  // A row is copied by half of the lanes.
  __device__ int half() const { return context_.lane() / kHalf; }
  __device__ int unit() const { return context_.lane() % kHalf * kUnit; }

  // Rows to shared memory; returns this lane's gates.
  __device__ Gates fetch(int head) const {
    const int lane = context_.lane(), value = head * kState + unit();
#pragma unroll 2
    for (int u = 1 + half(); u < rows_; u += 2) {
      const int row = ring_row(u);
      copy_async_16(keys() + u * kKeyStride + unit(), Base::ring_key(row) + unit());
      copy_async_16(values() + u * kState + unit(), Base::ring_value(row) + value);
      copy_async_16(raw_gates() + u * kState + unit(), Base::ring_gate(row, head) + unit());
    }
    Gates gates;
    if (lane > 0 && lane < rows_) gates = Base::gates(head, lane);

    wait_for_predecessor();
    const int key = b_.key_head * kState + unit(), new_value = b_.head * kState + value;
    if (half() == 0) {
      copy_async_16(keys() + unit(), input(p_.k, p_.k_stride, key));
      copy_async_16(query() + unit(), input(p_.q, p_.q_stride, key));
    } else {
      copy_async_16(values() + unit(), input(p_.v, p_.v_stride, new_value));
      copy_async_16(raw_gates() + unit(), input(p_.gate, p_.gate_stride, new_value));
    }
    if (lane == 0) gates = Base::gates(head, 0);
    copy_async_wait_all();
    return gates;
  }

  // Hands over the target; returns what this lane's row adds to the output.
  __device__ float walk(int head, float strength) const {
    float t[kElems];
    load_elements<Act, kElems>(query() + context_.lane() * kElems, t);
    const float scale = 1.0f / (sqrtf(warp_sum(dot<2>(t, t)) + kL2NormEps) * sqrtf(kState));
#pragma unroll
    for (int e = 0; e < kElems; ++e) t[e] *= scale;
    const float factor = key_factor();
    const float write = context_.lane() < rows_ ? strength * factor : 0.0f;
    const float known = walk_back(head, write * factor, t);
    typename Base::Target(context_).keep(head, 0, t);
    if (context_.lane() > 0) return write * known;
    handed_.output_scale(head, 0) = 1;
    return write * known + context_.skip(head);
  }

  // 1 / |k| of this lane's row.
  __device__ float key_factor() const {
    constexpr int kGroups = 32 / kRowLanes;
    const int lane = context_.lane();
    float mine = 1;
#pragma unroll 1
    for (int first = 0; first < rows_; first += kGroups) {
      float k[kState / kRowLanes];
      Shared::template load_key<Act>(keys() + (first + lane / kRowLanes) * kKeyStride,
                                     lane % kRowLanes, k);
      const float sum = __shfl_sync(kAllLanes, row_sum(dot<4>(k, k)), lane % kGroups * kRowLanes);
      if (lane / kGroups == first / kGroups) mine = sum;
    }
    return 1.0f / sqrtf(mine + kL2NormEps);
  }

  // A row as the walk needs it.
  struct Row {
    float k[kElems], a[kElems];
  };
  __device__ Row row(const ChannelDecays& channels, int u) const {
    Row r;
    const int at = context_.lane() * kElems;
    load_elements<Act, kElems>(keys() + u * kKeyStride + at, r.k);
    load_elements<Act, kElems>(raw_gates() + u * kState + at, r.a);
    channels.apply(r.a);
    return r;
  }
  // Back through all rows, with each: this lane's row's strength over the square of its length.
  // Returns the row's product with t as the newer rows leave it. Two rows at once: the older one's
  // product with t as the newer leaves it follows from products with t as it is.
  __device__ float walk_back(int head, float each, float (&t)[kElems]) const {
    const int lane = context_.lane();
    const ChannelDecays channels(p_.channel_gate, b_.head + head, kState, lane * kElems);
    float mine = 0;
    int u = 0;
#pragma unroll 1
    for (; u + 1 < rows_; u += 2) {
      const Row newer = row(channels, u), older = row(channels, u + 1);
      float k[kElems];
#pragma unroll
      for (int e = 0; e < kElems; ++e) k[e] = older.k[e] * newer.a[e];
      float sums[3] = {dot<2>(newer.k, t), dot<2>(k, t), dot<2>(k, newer.k)};
#pragma unroll
      for (int d = 16; d > 0; d /= 2)
#pragma unroll
        for (int n = 0; n < 3; ++n) sums[n] += __shfl_xor_sync(kAllLanes, sums[n], d);
      const float step = -__shfl_sync(kAllLanes, each, u) * sums[0];
      const float known = fmaf(step, sums[2], sums[1]);
      pass(newer, step, t);
      pass(older, -__shfl_sync(kAllLanes, each, u + 1) * known, t);
      if (lane == u) mine = sums[0];
      if (lane == u + 1) mine = known;
    }
    if (u < rows_) {
      const Row last = row(channels, u);
      const float known = warp_sum(dot<2>(last.k, t));
      pass(last, -__shfl_sync(kAllLanes, each, u) * known, t);
      if (lane == u) mine = known;
    }
    return mine;
  }
  __device__ static void pass(const Row& row, float step, float (&t)[kElems]) {
#pragma unroll
    for (int e = 0; e < kElems; ++e) t[e] = fmaf(step, row.k[e], t[e]) * row.a[e];
  }

  // The output so far.
  __device__ void mix(int head, float c) const {
    float o[kElems] = {};
#pragma unroll 4
    for (int u = 0; u < rows_; ++u) {
      float v[kElems];
      load_elements<Act, kElems>(values() + u * kState + context_.lane() * kElems, v);
      const float weight = __shfl_sync(kAllLanes, c, u);
#pragma unroll
      for (int e = 0; e < kElems; ++e) o[e] = fmaf(weight, v[e], o[e]);
    }
    store_elements<float, kElems>(handed_.outputs(0) + head * kState + context_.lane() * kElems, o);
  }

  // The window goes to the ring.
  __device__ void append(int head, const Gates& gates) const {
    const int window = ring_row(0);
    if (half() == 0) {
      if (b_.owns_key && head == 0) move(Base::ring_key(window) + unit(), keys() + unit());
      move(Base::ring_gate(window, head) + unit(), raw_gates() + unit());
    } else {
      move(Base::ring_value(window) + head * kState + unit(), values() + unit());
    }
    if (context_.lane() == 0) Base::append(head, gates);
  }
};

}  // namespace replayssm::cuda
