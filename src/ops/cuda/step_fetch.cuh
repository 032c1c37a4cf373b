// Brings ring and window rows to shared memory as they are, and the window to the ring.
#pragma once

#include "ops/cuda/step_block.cuh"
#include "ops/cuda/step_front.cuh"
#include "ops/cuda/step_gates.cuh"

namespace replayssm::cuda {

// All threads of the block call.
template <Family kFamily, class Act, int kState>
class RowFetch {
 public:
  using Shared = BlockShared<kFamily, Act, kState>;

  __device__ RowFetch(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                      const Shared& shared)
      : p_(p),
        launch_(launch),
        b_(b),
        shared_(shared),
        front_(p, launch, b, shared),
        ring_k_(static_cast<Act*>(p.state.ring_k) +
                (b.ring_row * launch.key_heads + b.key_head) * kState),
        ring_v_(static_cast<Act*>(p.state.ring_v) +
                (b.ring_row * launch.heads + b.head) * launch.head_dim + b.row),
        ring_gates_(b.ring_row * launch.heads + b.head) {}

  // Starts to copy ring rows.
  __device__ void fetch_history() const {
    const int unit = threadIdx.x % kRowThreads * kElems;
#pragma unroll 1
    for (int j = threadIdx.x / kRowThreads; j < b_.history; j += blockDim.x / kRowThreads) {
      const Act *const k = ring_key(j), *const v = ring_value(j);
#pragma unroll
      for (int at = 0; at < kState; at += kRowThreads * kElems)
        copy_async_16(shared_.key(j) + at + unit, k + at + unit);
#pragma unroll 1
      for (int at = unit; at < launch_.layout.columns; at += kRowThreads * kElems)
        copy_async_16(shared_.value(j) + at, v + at);
      if constexpr (kFamily == Family::kKimiDelta) fetch_raw_gates(j);
    }
    for_gates(0, b_.history, [&](int head, int j) {
      const int64_t at = ring_index(head, j);
      fetch_gates(head, j, p_.state.ring_b + at, p_.state.ring_g + at);
    });
  }

  // Waits for the kernel before, and starts to copy the window, or forms it.
  __device__ void fetch_window() const {
    if (launch_.conv.x) {
      front_.convolve();
      front_.form_gates();
    } else {
      wait_for_predecessor();
      copy_window();
      for_gates(b_.history, b_.rows, [&](int head, int j) {
        const int64_t at =
            static_cast<int64_t>(b_.token + j - b_.history) * launch_.heads + b_.head + head;
        fetch_gates(head, j, p_.b + at, p_.g + at);
      });
    }
    if constexpr (kFamily == Family::kKimiDelta) {
#pragma unroll 1
      for (int j = b_.history + threadIdx.x / kRowThreads; j < b_.rows;
           j += blockDim.x / kRowThreads)
        fetch_raw_gates(j);
    }
  }

  // Decays of the rows [begin, end), from what has been fetched.
  __device__ void form_decays(int begin, int end) const {
    if constexpr (kFamily == Family::kKimiDelta) {
      form_channel_decays(begin, end);
    } else {
      for_gates(begin, end, [&](int head, int j) {
        shared_.decays(head)[j] = expf(shared_.log_decays(head)[j]);
      });
    }
  }

  // Copies the window from shared memory to the ring. Warps before `first` have other things to do,
  // except for gates.
  __device__ void append(int first) const {
    if (!b_.owns_values) return;
    const int values = launch_.layout.columns / kElems;
    const int units = values + (b_.owns_key ? kState / kElems : 0);
#pragma unroll 1
    for (int n = threadIdx.x - 32 * first; n < units * b_.window; n += blockDim.x - 32 * first) {
      if (n < 0) break;
      const int i = b_.window == 1 ? 0 : n / units, j = b_.history + i, unit = n - i * units;
      if (unit < values) {
        move(ring_value(j) + unit * kElems, shared_.value(j) + unit * kElems);
      } else {
        const int at = (unit - values) * kElems;
        move(ring_key(j) + at, shared_.key(j) + at);
      }
    }
    if (!b_.owns_gates) return;
    for_gates(b_.history, b_.rows, [&](int head, int j) {
      const int64_t at = ring_index(head, j);
      p_.state.ring_b[at] = shared_.strengths(head)[j];
      if constexpr (kFamily != Family::kKimiDelta)
        p_.state.ring_g[at] = shared_.log_decays(head)[j];
    });
  }

 private:
  static constexpr int kElems = 16 / sizeof(Act);
  static constexpr int kRowThreads = 16;  // that copy a row together

  __device__ int physical(int j) const { return b_.physical(j, launch_.layout.rows); }
  // Calls fn(head, j) for the rows [begin, end) of every head, a warp per head and a lane per row;
  // the last warps first: the others may have more of the window.
  template <class Fn>
  __device__ void for_gates(int begin, int end, Fn&& fn) const {
#pragma unroll 1
    for (int head = launch_.config.warps - 1 - threadIdx.x / 32; head < launch_.config.heads;
         head += launch_.config.warps)
#pragma unroll 1
      for (int j = begin + threadIdx.x % 32; j < end; j += 32) fn(head, j);
  }
  __device__ void fetch_gates(int head, int j, const float* b, const float* g) const {
    copy_async_4(shared_.strengths(head) + j, b);
    if constexpr (kFamily != Family::kKimiDelta) copy_async_4(shared_.log_decays(head) + j, g);
  }
  // kRowThreads threads call.
  __device__ void fetch_raw_gates(int j) const {
#pragma unroll 1
    for (int head = 0; head < launch_.config.heads; ++head) {
      const Act* const from = raw_gate(head, j);
#pragma unroll
      for (int at = threadIdx.x % kRowThreads * kElems; at < kState; at += kRowThreads * kElems)
        copy_async_16(shared_.raw_gates(head, j) + at, from + at);
    }
  }

  __device__ int64_t ring_index(int head, int j) const {
    return ring_gates_ + physical(j) * launch_.heads + head;
  }
  __device__ Act* ring_key(int j) const {
    return ring_k_ + physical(j) * (launch_.key_heads * kState);
  }
  __device__ Act* ring_value(int j) const {
    return ring_v_ + physical(j) * (launch_.heads * launch_.head_dim);
  }
  __device__ static void move(Act* to, const Act* from) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  }

  // The first threads take a row's values, the last ones its keys and queries.
  __device__ void copy_window() const {
    const int lane = threadIdx.x * kElems, back = (blockDim.x - 1 - threadIdx.x) * kElems;
    const int at = b_.key_head * kState + back;
    const Act* v = input(p_.v, p_.v_stride, b_.head * launch_.head_dim + b_.row);
    const Act *k = input(p_.k, p_.k_stride, at), *q = input(p_.q, p_.q_stride, at);
#pragma unroll 1
    for (int i = 0; i < b_.window; ++i) {
      const int j = b_.history + i;
#pragma unroll 1
      for (int unit = lane; unit < launch_.layout.columns; unit += blockDim.x * kElems)
        copy_async_16(shared_.value(j) + unit, v + unit);
      if (back < kState) {
        copy_async_16(shared_.key(j) + back, k);
        copy_async_16(shared_.query(i) + back, q);
      }
      v += p_.v_stride, k += p_.k_stride, q += p_.q_stride;
    }
  }
  // Of the window's first token.
  __device__ const Act* input(const void* rows, int64_t stride, int at) const {
    return static_cast<const Act*>(rows) + b_.token * stride + at;
  }

  // Kimi Delta's: a warp per row of a head, four columns a lane. Those of the window go to the
  // ring.
  __device__ void form_channel_decays(int begin, int end) const {
    const int column = threadIdx.x % 32 * 4;
#pragma unroll 1
    for (int head = 0; head < launch_.config.heads; ++head) {
      const ChannelDecays channels(p_.channel_gate, b_.head + head, kState, column);
#pragma unroll 2
      for (int j = begin + threadIdx.x / 32; j < end; j += launch_.config.warps) {
        float x[4];
        load_elements<Act, 4>(shared_.raw_gates(head, j) + column, x);
        __syncwarp();
        if (j >= b_.history && b_.owns_gates)
          store_elements<Act, 4>(ring_gate(head, j) + column, x);
        channels.apply(x);
        store_elements<float, 4>(shared_.channel_decays(head, j) + padded_index(column), x);
      }
    }
  }
  __device__ Act* ring_gate(int head, int j) const {
    return static_cast<Act*>(p_.state.ring_gate) + ring_index(head, j) * kState;
  }
  __device__ const Act* raw_gate(int head, int j) const {
    if (j < b_.history) return ring_gate(head, j);
    return static_cast<const Act*>(p_.gate) + (b_.token + j - b_.history) * p_.gate_stride +
           (b_.head + head) * kState;
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Shared& shared_;
  const LayerFront<kFamily, Act, kState> front_;
  // Of the slot's first physical row.
  Act *const ring_k_, *const ring_v_;
  const int64_t ring_gates_;
};

}  // namespace replayssm::cuda
