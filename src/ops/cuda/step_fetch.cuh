// Brings ring and window rows to shared memory as fp32, and the window to the ring.
#pragma once

#include "ops/cuda/step_block.cuh"

namespace replayssm::cuda {

// All threads of the block call fetch; a barrier must follow.
template <Family kFamily, class Act, int kState>
class RowFetch {
 public:
  using Shared = BlockShared<kFamily, kState>;

  __device__ RowFetch(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                      const Shared& shared)
      : p_(p),
        launch_(launch),
        b_(b),
        shared_(shared),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        unit_(threadIdx.x % kUnits),
        takes_key_(lane_ < kUnits),
        units_(takes_key_ ? kState / kElems : launch.layout.columns / kElems),
        column_((b.head * launch.head_dim + b.row)) {}

  __device__ void fetch() const {
    uint4 ring[kBatch], window;
    load_ring(0, ring);
    if constexpr (kFamily == Family::kKimiDelta) form_decays(0, b_.history);
    wait_for_predecessor();
    load_window(warp_, window);
    const Gates gates = load_gates(warp_, lane_);
    store_ring(0, ring);
    store_window(warp_, window);
    fetch_rest(ring, window);
    if constexpr (kFamily == Family::kKimiDelta) form_decays(b_.history, b_.rows);
    store_gates(gates);
  }

 private:
  // Half a warp copies keys, the other half values, 16 bytes a lane: an item is a row, or a part of
  // one that is longer.
  static constexpr int kUnits = 16, kElems = 16 / sizeof(Act), kBatch = 4;

  struct Item {
    int row, unit;
    bool active;
  };
  __device__ Item item(int n, int rows) const {
    const int row = launch_.row_units.divide(n);
    const int unit = (n - row * launch_.row_units.divisor) * kUnits + unit_;
    return {row, unit, row < rows && unit < units_};
  }
  __device__ int items(int rows) const { return rows * launch_.row_units.divisor; }

  // A lane's share of a row of keys or values, in the ring and in the inputs.
  __device__ uint4* ring_word(int j, int unit) const {
    const int64_t row = b_.ring_row + b_.physical(j, launch_.layout.rows);
    Act* const base = takes_key_ ? static_cast<Act*>(p_.state.ring_k) +
                                       (row * launch_.key_heads + b_.key_head) * kState
                                 : static_cast<Act*>(p_.state.ring_v) +
                                       row * (launch_.heads * launch_.head_dim) + column_;
    return reinterpret_cast<uint4*>(base) + unit;
  }
  __device__ const uint4* input_word(const void* keys, int64_t key_stride, int i, int unit) const {
    const int64_t token = b_.token + i;
    const Act* const base =
        takes_key_ ? static_cast<const Act*>(keys) + token * key_stride + b_.key_head * kState
                   : static_cast<const Act*>(p_.v) + token * p_.v_stride + column_;
    return reinterpret_cast<const uint4*>(base) + unit;
  }
  __device__ void store(float* key, float* value, int unit, const uint4& word) const {
    float x[kElems];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      widen<Act>(reinterpret_cast<const uint32_t*>(&word)[i], x + i * (kElems / 4));
    float* const to = takes_key_ ? key + padded_index(unit * kElems) : value + unit * kElems;
#pragma unroll
    for (int i = 0; i < kElems; i += 4) store_elements<float, 4>(to + i, x + i);
  }

  __device__ void load_ring(int first, uint4 (&words)[kBatch]) const {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const Item at = item(first + u * launch_.config.warps + warp_, b_.history);
      if (at.active) words[u] = *ring_word(at.row, at.unit);
    }
  }
  __device__ void store_ring(int first, const uint4 (&words)[kBatch]) const {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const Item at = item(first + u * launch_.config.warps + warp_, b_.history);
      if (at.active) store(shared_.key(at.row), shared_.value(at.row), at.unit, words[u]);
    }
  }

  // Rows of the window, then its queries.
  __device__ void load_window(int n, uint4& word) const {
    const Item at = item(n, 2 * b_.window);
    if (!at.active) return;
    if (at.row < b_.window) {
      word = *input_word(p_.k, p_.k_stride, at.row, at.unit);
    } else if (takes_key_) {
      word = *input_word(p_.q, p_.q_stride, at.row - b_.window, at.unit);
    }
  }
  __device__ void store_window(int n, const uint4& word) const {
    const Item at = item(n, 2 * b_.window);
    if (!at.active) return;
    if (at.row < b_.window) {
      const int j = b_.history + at.row;
      store(shared_.key(j), shared_.value(j), at.unit, word);
      const bool appends = takes_key_ ? b_.owns_key : p_.route != Route::kConventional;
      if (appends) *ring_word(j, at.unit) = word;
    } else if (takes_key_) {
      store(shared_.query(at.row - b_.window), nullptr, at.unit, word);
    }
  }

  // What one batch per thread does not hold.
  __device__ void fetch_rest(uint4 (&ring)[kBatch], uint4& window) const {
    const int warps = launch_.config.warps;
#pragma unroll 1
    for (int first = kBatch * warps; first < items(b_.history); first += kBatch * warps) {
      load_ring(first, ring);
      store_ring(first, ring);
    }
#pragma unroll 1
    for (int n = warp_ + warps; n < items(2 * b_.window); n += warps) {
      load_window(n, window);
      store_window(n, window);
    }
  }

  // Write strength and log decay of row j of a head.
  struct Gates {
    float b = 0, g = 0;
  };
  __device__ int64_t ring_gate_index(int head, int j) const {
    return (b_.ring_row + b_.physical(j, launch_.layout.rows)) * launch_.heads + b_.head + head;
  }
  __device__ Gates load_gates(int head, int j) const {
    if (head >= launch_.config.heads || j >= b_.rows) return {};
    constexpr bool kScalar = kFamily != Family::kKimiDelta;
    if (j < b_.history) {
      const int64_t at = ring_gate_index(head, j);
      return {p_.state.ring_b[at], kScalar ? p_.state.ring_g[at] : 0.0f};
    }
    const int64_t at =
        static_cast<int64_t>(b_.token + j - b_.history) * launch_.heads + b_.head + head;
    return {p_.b[at], kScalar ? p_.g[at] : 0.0f};
  }
  __device__ void store_gates(int head, int j, const Gates& gates) const {
    if (j >= b_.rows) return;
    shared_.strength(head, j) = gates.b;
    if constexpr (kFamily != Family::kKimiDelta) shared_.decay(head, j) = expf(gates.g);
    if constexpr (kFamily == Family::kMamba2) shared_.log_decay(head, j) = gates.g;
    if (j < b_.history || !b_.owns_gates) return;
    const int64_t at = ring_gate_index(head, j);
    p_.state.ring_b[at] = gates.b;
    if constexpr (kFamily != Family::kKimiDelta) p_.state.ring_g[at] = gates.g;
  }
  // A warp per head, a lane per row; `first` are those of its first 32.
  __device__ void store_gates(const Gates& first) const {
#pragma unroll 1
    for (int head = warp_; head < launch_.config.heads; head += launch_.config.warps)
#pragma unroll 1
      for (int j = lane_; j < b_.rows; j += 32)
        store_gates(head, j, head == warp_ && j < 32 ? first : load_gates(head, j));
  }

  __device__ float channel_decay(float raw, float scale, float bias) const {
    const float x = raw + bias;
    if (p_.channel_gate.lower_bound < 0)
      return expf(p_.channel_gate.lower_bound / (1.0f + expf(scale * x)));
    return expf(scale * softplus(x));
  }

  // Kimi Delta's decays of rows [begin, end): a warp per row of a head, four columns a lane.
  __device__ void form_decays(int begin, int end) const {
    static_assert(kState == 128 || kFamily != Family::kKimiDelta);
    const int column = lane_ * 4;
#pragma unroll 1
    for (int head = 0; head < launch_.config.heads; ++head) {
      float bias[4];
      load_elements<float, 4>(p_.channel_gate.bias + (b_.head + head) * kState + column, bias);
      const float scale = p_.channel_gate.scale[b_.head + head];
#pragma unroll 1
      for (int first = begin + warp_; first < end; first += kBatch * launch_.config.warps) {
        float raw[kBatch][4];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int j = first + u * launch_.config.warps;
          if (j < end) load_elements<Act, 4>(raw_gate(head, j, column), raw[u]);
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int j = first + u * launch_.config.warps;
          if (j >= end) break;
          if (j >= b_.history && b_.owns_gates)
            store_elements<Act, 4>(ring_gate(head, j, column), raw[u]);
#pragma unroll
          for (int e = 0; e < 4; ++e) raw[u][e] = channel_decay(raw[u][e], scale, bias[e]);
          store_elements<float, 4>(shared_.channel_decays(head, j) + padded_index(column), raw[u]);
        }
      }
    }
  }
  __device__ Act* ring_gate(int head, int j, int column) const {
    return static_cast<Act*>(p_.state.ring_gate) + ring_gate_index(head, j) * kState + column;
  }
  __device__ const Act* raw_gate(int head, int j, int column) const {
    if (j < b_.history) return ring_gate(head, j, column);
    return static_cast<const Act*>(p_.gate) + (b_.token + j - b_.history) * p_.gate_stride +
           (b_.head + head) * kState + column;
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Shared& shared_;
  const int warp_, lane_, unit_;
  const bool takes_key_;
  const int units_, column_;
};

}  // namespace replayssm::cuda
