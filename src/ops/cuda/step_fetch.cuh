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

  // Starts to copy ring rows: a group of copies.
  __device__ void fetch_history() const {
    const int unit = threadIdx.x % kRowThreads * kElems;
#pragma unroll 1
    for (int j = threadIdx.x / kRowThreads; j < b_.history; j += blockDim.x / kRowThreads) {
      const int row = physical(j);
      const Act* const k = ring_k_ + row * (launch_.key_heads * kState);
      const Act* const v = ring_v_ + row * (launch_.heads * launch_.head_dim);
#pragma unroll
      for (int at = 0; at < kState; at += kRowThreads * kElems)
        copy_async_16(shared_.key(j) + at + unit, k + at + unit);
#pragma unroll 1
      for (int at = unit; at < launch_.layout.columns; at += kRowThreads * kElems)
        copy_async_16(shared_.value(j) + at, v + at);
    }
    copy_async_commit();
    if constexpr (kFamily == Family::kKimiDelta) form_decays(0, b_.history);
  }

  // Waits for the kernel before.
  __device__ void fetch_window() const {
    if (launch_.conv.x) {
      front_.convolve();
      if (launch_.norm.z) front_.prefetch_gates();
    } else {
      wait_for_predecessor();
      copy_window();
    }
    if constexpr (kFamily == Family::kKimiDelta) form_decays(b_.history, b_.rows);
  }

  // A warp per head, a lane per row. The last warps first: the others may have more of the window.
  __device__ void fetch_gates() const {
#pragma unroll 1
    for (int head = launch_.config.warps - 1 - threadIdx.x / 32; head < launch_.config.heads;
         head += launch_.config.warps)
#pragma unroll 1
      for (int j = threadIdx.x % 32; j < b_.rows; j += 32) {
        const StepGates gates = load_gates(head, j);
        shared_.strengths(head)[j] = gates.b;
        if constexpr (kFamily != Family::kKimiDelta) {
          shared_.log_decays(head)[j] = gates.g;
          shared_.decays(head)[j] = expf(gates.g);
        }
      }
  }

  // Copies the window from shared memory to the ring; gates too must be there.
  __device__ void append() const {
    if (launch_.fold_all || p_.route == Route::kConventional) return;
#pragma unroll 1
    for (int j = b_.history; j < b_.rows; ++j) {
      copy(ring_value(j), shared_.value(j), launch_.layout.columns);
      if (b_.owns_key) copy(ring_key(j), shared_.key(j), kState);
      if (!b_.owns_gates) continue;
      for (int head = threadIdx.x; head < launch_.config.heads; head += blockDim.x) {
        p_.state.ring_b[ring_index(head, j)] = shared_.strengths(head)[j];
        if constexpr (kFamily != Family::kKimiDelta)
          p_.state.ring_g[ring_index(head, j)] = shared_.log_decays(head)[j];
      }
    }
  }

 private:
  static constexpr int kElems = 16 / sizeof(Act);
  static constexpr int kRowThreads = 16;  // that copy a row together

  __device__ int physical(int j) const { return b_.physical(j, launch_.layout.rows); }
  __device__ int64_t ring_index(int head, int j) const {
    return ring_gates_ + physical(j) * launch_.heads + head;
  }
  __device__ Act* ring_key(int j) const {
    return ring_k_ + physical(j) * (launch_.key_heads * kState);
  }
  __device__ Act* ring_value(int j) const {
    return ring_v_ + physical(j) * (launch_.heads * launch_.head_dim);
  }
  __device__ const Act* input(const void* rows, int64_t stride, int i, int at) const {
    return static_cast<const Act*>(rows) + (b_.token + i) * stride + at;
  }
  __device__ static void copy(Act* to, const Act* from, int count) {
#pragma unroll 1
    for (int i = threadIdx.x * kElems; i < count; i += blockDim.x * kElems) move(to + i, from + i);
  }
  __device__ static void move(Act* to, const Act* from) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  }

  __device__ StepGates load_gates(int head, int j) const {
    const bool old = j < b_.history;
    if (!old && launch_.conv.x) return front_.gates(head, j - b_.history);
    const int64_t at =
        old ? ring_index(head, j)
            : static_cast<int64_t>(b_.token + j - b_.history) * launch_.heads + b_.head + head;
    StepGates gates;
    gates.b = (old ? p_.state.ring_b : p_.b)[at];
    if constexpr (kFamily != Family::kKimiDelta) gates.g = (old ? p_.state.ring_g : p_.g)[at];
    return gates;
  }

  // The first threads take a row's values, the last ones its keys and queries.
  __device__ void copy_window() const {
    const int lane = threadIdx.x * kElems, back = (blockDim.x - 1 - threadIdx.x) * kElems;
#pragma unroll 1
    for (int i = 0; i < b_.window; ++i) {
      const int j = b_.history + i;
      const Act* const v = input(p_.v, p_.v_stride, i, b_.head * launch_.head_dim + b_.row);
#pragma unroll 1
      for (int at = lane; at < launch_.layout.columns; at += blockDim.x * kElems)
        move(shared_.value(j) + at, v + at);
      if (back < kState) {
        const int at = b_.key_head * kState + back;
        move(shared_.key(j) + back, input(p_.k, p_.k_stride, i, at));
        move(shared_.query(i) + back, input(p_.q, p_.q_stride, i, at));
      }
    }
  }

  // Kimi Delta's decays of rows [begin, end): a warp per row of a head, four columns a lane.
  __device__ void form_decays(int begin, int end) const {
    constexpr int kBatch = 4;
    const int column = threadIdx.x % 32 * 4, warps = launch_.config.warps;
#pragma unroll 1
    for (int head = 0; head < launch_.config.heads; ++head) {
      const ChannelDecays channels(p_.channel_gate, b_.head + head, kState, column);
#pragma unroll 1
      for (int first = begin + threadIdx.x / 32; first < end; first += kBatch * warps) {
        float raw[kBatch][4];
#pragma unroll
        for (int u = 0; u < kBatch; ++u)
          if (first + u * warps < end)
            load_elements<Act, 4>(raw_gate(head, first + u * warps, column), raw[u]);
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int j = first + u * warps;
          if (j >= end) break;
          if (j >= b_.history && b_.owns_gates)
            store_elements<Act, 4>(ring_gate(head, j, column), raw[u]);
          channels.apply(raw[u]);
          store_elements<float, 4>(shared_.channel_decays(head, j) + padded_index(column), raw[u]);
        }
      }
    }
  }
  __device__ Act* ring_gate(int head, int j, int column) const {
    return static_cast<Act*>(p_.state.ring_gate) + ring_index(head, j) * kState + column;
  }
  __device__ const Act* raw_gate(int head, int j, int column) const {
    if (j < b_.history) return ring_gate(head, j, column);
    return input(p_.gate, p_.gate_stride, j - b_.history, (b_.head + head) * kState + column);
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
