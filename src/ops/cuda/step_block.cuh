// What a block of a decode step needs before it can read states: where it stands, and the rows of
// ring and window in shared memory.
#pragma once

#include "ops/cuda/elements.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/step_launch.h"
#include "ops/cuda/stream.cuh"

namespace replayssm::cuda {

// Where a block stands.
struct BlockPlace {
  int sequence, head, row;  // its first head, and the first of its rows within that head
  int key_head;
  bool owns_key, owns_gates;  // it appends the window's keys, its gates
  int slot, target, token, window;
  int64_t ring_row;   // the slot's first physical row
  int ring_first;     // row 0, counted from there
  int history, rows;  // ring rows; with the window
  int stored;         // the first rows: their effect goes into the checkpoint
  int replayed;       // the first rows: the recurrence runs over them; the others are mixed in

  __device__ int64_t physical(int row_index, int ring_rows) const {
    const int at = ring_first + row_index;
    return ring_row + (at < ring_rows ? at : at - ring_rows);
  }
};

__device__ inline BlockPlace block_place(const RecurrentStepParams& p, const StepLaunch& launch) {
  BlockPlace b;
  const auto& config = launch.config;
  b.sequence = blockIdx.x / launch.blocks_per_sequence;
  const int part = blockIdx.x % launch.blocks_per_sequence;
  const int group = static_cast<int>(p.shape.heads / p.shape.key_heads);
  const int slice = part % config.slices;
  b.head = part / config.slices * config.heads;
  b.row = slice * launch.layout.columns;
  b.key_head = b.head / group;
  b.slot = p.batch.slot[b.sequence];
  b.token = launch.fold_all ? 0 : p.batch.query_start[b.sequence];
  b.window = launch.fold_all ? 0 : p.batch.query_start[b.sequence + 1] - b.token;
  b.target = launch.target_slot ? launch.target_slot[b.sequence] : b.slot;
  const bool keeps = !launch.fold_all && p.route != Route::kConventional;
  b.owns_gates = keeps && slice == 0;
  b.owns_key = b.owns_gates && b.head % group == 0;
  if (b.slot < 0) return b;
  const Cursor cursor = p.batch.cursors[b.slot];
  b.ring_row = static_cast<int64_t>(b.slot) * launch.layout.rows;
  b.ring_first =
      static_cast<int>((cursor.ring_start - cursor.fold_count) % launch.layout.rows);
  b.history = cursor.fold_count + cursor.ring_count;
  b.rows = b.history + b.window;
  b.stored = launch.fold_all                      ? b.history
             : p.route == Route::kConventional ? b.rows
                                               : cursor.fold_count;
  b.replayed = p.route == Route::kStateAndOutput ? b.rows : b.stored;
  return b;
}

template <Family kFamily, class Act, int kState>
class BlockRows {
 public:
  using KeyT = std::conditional_t<kFamily == Family::kMamba2, Act, float>;
  static constexpr int kPerLane = kState / kRowLanes;

  __device__ BlockRows(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                       char* shared)
      : p_(p), launch_(launch), layout_(launch.layout), b_(b), shared_(shared) {}

  // Loads ring and window, appends the window to the ring. A barrier must follow.
  __device__ void stage() {
    stage_values();
    stage_gates();
    if constexpr (kFamily == Family::kKimiDelta) stage_decays();
    stage_keys();
    copy_async_wait();
  }

  // This lane's share of key j and of query i, as Map lays a row out.
  template <class Map>
  __device__ void key(int j, int lane, float (&k)[kPerLane]) const {
    const char* row = shared_ + layout_.keys + j * layout_.key_bytes;
    if constexpr (kFamily == Family::kMamba2) {
      constexpr int kMost = 16 / sizeof(Act), kRun = Map::kElems < kMost ? Map::kElems : kMost;
#pragma unroll
      for (int c = 0; c < Map::kChunks; ++c)
#pragma unroll
        for (int e = 0; e < Map::kElems; e += kRun)
          load_elements<Act, kRun>(reinterpret_cast<const Act*>(row) + Map::element(c, lane) + e,
                                   k + c * Map::kElems + e);
    } else {
      load_padded<Map>(reinterpret_cast<const float*>(row), lane, k);
    }
  }
  template <class Map>
  __device__ void query(int i, int lane, float (&q)[kPerLane]) const {
    load_padded<Map>(floats(layout_.query) + i * padded_width(kState), lane, q);
  }
  // Kimi Delta: the decays of row j.
  template <class Map>
  __device__ void decays(int head, int j, int lane, float (&a)[kPerLane]) const {
    load_padded<Map>(
        floats(layout_.decay) + (head * layout_.rows + j) * padded_width(kState), lane, a);
  }
  __device__ float decay(int head, int j) const {
    return floats(layout_.decay)[head * layout_.rows + j];
  }
  __device__ float log_decay(int head, int j) const {
    return floats(layout_.log_decay)[head * layout_.rows + j];
  }
  __device__ float strength(int head, int j) const {
    return floats(layout_.strength)[head * layout_.rows + j];
  }
  __device__ float product(int i, int j) const {
    return floats(layout_.products)[i * layout_.rows + j];
  }
  __device__ float value(int j, int column) const {
    const char* row = shared_ + layout_.values + j * layout_.value_bytes;
    return to_float(reinterpret_cast<const Act*>(row)[column]);
  }
  __device__ float* coefficients(int warp) const {
    return floats(layout_.coefficients) + warp * layout_.rows;
  }
  __device__ float* scales() const { return floats(layout_.scales); }
  __device__ float* outputs() const { return floats(layout_.outputs); }

 private:
  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(shared_ + offset); }

  template <class Map>
  __device__ static void load_padded(const float* row, int lane, float (&x)[kPerLane]) {
    constexpr int kRun = Map::kElems < 4 ? Map::kElems : 4;
#pragma unroll
    for (int c = 0; c < Map::kChunks; ++c)
#pragma unroll
      for (int e = 0; e < Map::kElems; e += kRun)
        load_elements<float, kRun>(row + padded_index(Map::element(c, lane) + e),
                                   x + c * Map::kElems + e);
  }

  __device__ const Act* window_row(const void* rows, int64_t stride, int i) const {
    return static_cast<const Act*>(rows) + (b_.token + i) * stride;
  }

  __device__ void stage_values() {
    constexpr int kPerCopy = 16 / sizeof(Act);
    const auto& shape = p_.shape;
    const int copies = layout_.columns / kPerCopy;
    const int64_t column = b_.head * shape.head_dim + b_.row;
    for (int n = threadIdx.x; n < b_.rows * copies; n += blockDim.x) {
      const int j = n / copies, at = n % copies * kPerCopy;
      Act* ring = static_cast<Act*>(p_.state.ring_v) +
                  b_.physical(j, layout_.rows) * shape.heads * shape.head_dim + column + at;
      char* target = shared_ + layout_.values + j * layout_.value_bytes + at * sizeof(Act);
      if (j < b_.history) {
        copy_async_16(target, ring);
        continue;
      }
      const uint4 word = *reinterpret_cast<const uint4*>(
          window_row(p_.v, p_.v_stride, j - b_.history) + column + at);
      *reinterpret_cast<uint4*>(target) = word;
      if (p_.route != Route::kConventional) *reinterpret_cast<uint4*>(ring) = word;
    }
  }

  __device__ void stage_gates() {
    const int heads = launch_.config.heads;
    for (int n = threadIdx.x; n < b_.rows * heads; n += blockDim.x) {
      const int j = n / heads, h = n % heads, i = j - b_.history;
      const int64_t ring = b_.physical(j, layout_.rows) * p_.shape.heads + b_.head + h;
      const int64_t token = (b_.token + i) * p_.shape.heads + b_.head + h;
      const int at = h * layout_.rows + j;
      const float b = i < 0 ? p_.state.ring_b[ring] : p_.b[token];
      floats(layout_.strength)[at] = b;
      if (i >= 0 && b_.owns_gates) p_.state.ring_b[ring] = b;
      if constexpr (kFamily != Family::kKimiDelta) {
        const float g = i < 0 ? p_.state.ring_g[ring] : p_.g[token];
        floats(layout_.decay)[at] = expf(g);
        floats(layout_.log_decay)[at] = g;
        if (i >= 0 && b_.owns_gates) p_.state.ring_g[ring] = g;
      }
    }
  }

  __device__ float channel_decay(float raw, float scale, float bias) const {
    const float x = raw + bias;
    if (p_.channel_gate.lower_bound < 0)
      return expf(p_.channel_gate.lower_bound / (1.0f + expf(scale * x)));
    return expf(scale * (x > 20.0f ? x : log1pf(expf(x))));
  }

  __device__ void stage_decays() {
    constexpr int kElems = 4, kRuns = kState / kElems;
    for (int n = threadIdx.x; n < launch_.config.heads * b_.rows * kRuns; n += blockDim.x) {
      const int col = n % kRuns * kElems, j = n / kRuns % b_.rows, h = n / kRuns / b_.rows;
      const int head = b_.head + h, i = j - b_.history;
      Act* ring =
          static_cast<Act*>(p_.state.ring_gate) +
          (b_.physical(j, layout_.rows) * p_.shape.heads + head) * kState + col;
      const Act* source = i < 0 ? ring : window_row(p_.gate, p_.gate_stride, i) + head * kState + col;
      float raw[kElems], bias[kElems], a[kElems];
      load_elements<Act, kElems>(source, raw);
      load_elements<float, kElems>(p_.channel_gate.bias + head * kState + col, bias);
      if (i >= 0 && b_.owns_gates) store_elements<Act, kElems>(ring, raw);
      const float scale = p_.channel_gate.scale[head];
#pragma unroll
      for (int e = 0; e < kElems; ++e) a[e] = channel_decay(raw[e], scale, bias[e]);
      float* target = floats(layout_.decay) + (h * layout_.rows + j) * padded_width(kState);
      store_elements<float, kElems>(target + padded_index(col), a);
    }
  }

  // Eight lanes a row: keys of ring and window, then the queries.
  __device__ void stage_keys() {
    using Map = RowMap<Act, kState>;
    const int lane = threadIdx.x % kRowLanes, groups = blockDim.x / kRowLanes;
    const int total = b_.rows + b_.window;
    for (int base = 0; base < total; base += groups) {
      const int row = base + threadIdx.x / kRowLanes, i = row - b_.rows;
      float x[kPerLane] = {};
      if (row < total) {
        Act* ring = static_cast<Act*>(p_.state.ring_k) +
                    (b_.physical(row, layout_.rows) * p_.shape.key_heads + b_.key_head) * kState;
        const Act* source = ring;
        if (i >= 0) {
          source = window_row(p_.q, p_.q_stride, i) + b_.key_head * kState;
        } else if (row >= b_.history) {
          source = window_row(p_.k, p_.k_stride, row - b_.history) + b_.key_head * kState;
        }
        Map::load(source, lane, x);
        if (row >= b_.history && i < 0 && b_.owns_key) store_row(ring, lane, x);
      }
      stage_row(row, i, total, lane, x);
    }
  }

  __device__ static void store_row(Act* row, int lane, const float (&x)[kPerLane]) {
    using Map = RowMap<Act, kState>;
#pragma unroll
    for (int c = 0; c < Map::kChunks; ++c)
      store_elements<Act, Map::kElems>(row + Map::element(c, lane), x + c * Map::kElems);
  }

  __device__ void stage_row(int row, int i, int total, int lane, float (&x)[kPerLane]) {
    using Map = RowMap<Act, kState>;
    char* key = shared_ + layout_.keys + row * layout_.key_bytes;
    float* padded = i < 0 ? reinterpret_cast<float*>(key)
                          : floats(layout_.query) + i * padded_width(kState);
    if constexpr (kFamily == Family::kMamba2) {
      if (row >= total) return;
      if (i < 0) return store_row(reinterpret_cast<Act*>(key), lane, x);
    } else {
      const float norm = sqrtf(row_sum(dot<4>(x, x)) + kL2NormEps);
      if (row >= total) return;
      const float factor = (i < 0 ? 1.0f : 1.0f / sqrtf(kState)) / norm;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) x[e] = __fmul_rn(x[e], factor);
    }
    constexpr int kRun = Map::kElems < 4 ? Map::kElems : 4;
#pragma unroll
    for (int c = 0; c < Map::kChunks; ++c)
#pragma unroll
      for (int e = 0; e < Map::kElems; e += kRun)
        store_elements<float, kRun>(padded + padded_index(Map::element(c, lane) + e),
                                    x + c * Map::kElems + e);
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const StepLayout& layout_;
  const BlockPlace& b_;
  char* shared_;
};

}  // namespace replayssm::cuda
