// What a block of a decode step needs before it can read states: where it stands, and the rows of
// ring and window in shared memory.
#pragma once

#include "ops/cuda/async_copy.cuh"
#include "ops/cuda/elements.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/step_launch.h"

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

  // Where row j lies among the slot's physical rows.
  __device__ int physical(int j, int ring_rows) const {
    const int at = ring_first + j;
    return at < ring_rows ? at : at - ring_rows;
  }
};

__device__ inline BlockPlace block_place(const RecurrentStepParams& p, const StepLaunch& launch) {
  BlockPlace b;
  const auto& config = launch.config;
  b.sequence = blockIdx.y;
  const int part = launch.slices.divide(blockIdx.x);
  const int slice = blockIdx.x - part * config.slices;
  b.head = part * config.heads;
  b.row = slice * launch.layout.columns;
  b.key_head = launch.group.divide(b.head);
  b.slot = p.batch.slot[b.sequence];
  b.token = launch.fold_all ? 0 : p.batch.query_start[b.sequence];
  b.window = launch.fold_all ? 0 : p.batch.query_start[b.sequence + 1] - b.token;
  b.target = launch.target_slot ? launch.target_slot[b.sequence] : b.slot;
  const bool keeps = !launch.fold_all && p.route != Route::kConventional;
  b.owns_gates = keeps && slice == 0;
  b.owns_key = b.owns_gates && launch.group.modulo(b.head) == 0;
  if (b.slot < 0) return b;
  const Cursor cursor = p.batch.cursors[b.slot];
  b.ring_row = static_cast<int64_t>(b.slot) * launch.layout.rows;
  b.ring_first = static_cast<int>(launch.ring_rows.modulo64(cursor.ring_start - cursor.fold_count));
  b.history = cursor.fold_count + cursor.ring_count;
  b.rows = b.history + b.window;
  b.stored = launch.fold_all                   ? b.history
             : p.route == Route::kConventional ? b.rows
                                               : cursor.fold_count;
  b.replayed = p.route == Route::kStateAndOutput ? b.rows : b.stored;
  return b;
}

// Ring and window rows in shared memory, as they came.
template <Family kFamily, class Act, int kState>
class BlockRows {
 public:
  static constexpr int kPerLane = kState / kRowLanes;
  using Map = RowMap<float, kState>;

  __device__ BlockRows(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                       char* shared)
      : p_(p), launch_(launch), layout_(launch.layout), b_(b), shared_(shared) {}

  // Starts all copies; a wait and a barrier must follow. The window joins the ring on its way, its
  // gates follow with their heads. Kimi Delta's decays are formed meanwhile.
  __device__ void fetch() const {
    fetch_keys();
    fetch_values();
    fetch_window();
    if constexpr (kFamily == Family::kKimiDelta) form_decays();
  }

  // Write strength and log decay of row j of a head.
  struct Gates {
    float b, g;
  };
  __device__ Gates gates(int head, int j) const {
    const int i = j - b_.history;
    const int64_t at = i < 0 ? gate_index(head, j)
                             : static_cast<int64_t>(b_.token + i) * launch_.heads + b_.head + head;
    if constexpr (kFamily == Family::kKimiDelta)
      return {i < 0 ? p_.state.ring_b[at] : p_.b[at], 0.0f};
    return {i < 0 ? p_.state.ring_b[at] : p_.b[at], i < 0 ? p_.state.ring_g[at] : p_.g[at]};
  }
  __device__ void append_gates(int head, int j, Gates gates) const {
    const int64_t at = gate_index(head, j);
    p_.state.ring_b[at] = gates.b;
    if constexpr (kFamily != Family::kKimiDelta) p_.state.ring_g[at] = gates.g;
  }

  // This lane's share of key j and of query i.
  template <class M>
  __device__ void key(int j, int lane, float (&k)[kPerLane]) const {
    load_row<M>(keys_at(j), lane, k);
  }
  __device__ void query(int i, int lane, float (&q)[kPerLane]) const {
    load_row<Map>(shared_ + layout_.queries + i * layout_.key_bytes, lane, q);
  }
  // Kimi Delta: the decays of row j.
  template <class M>
  __device__ void decays(int head, int j, int lane, float (&a)[kPerLane]) const {
    load_padded<M, kPerLane>(
        floats(layout_.decays) + (head * layout_.rows + j) * padded_width(kState), lane, a);
  }
  __device__ const Act* values(int j) const { return reinterpret_cast<const Act*>(values_at(j)); }
  // A thread's ring of words, group by group; those of a warp's lanes lie side by side.
  __device__ char* stream(int thread) const {
    return shared_ + layout_.stream + thread / 32 * (kDepth * kWords * 32 * 16) + thread % 32 * 16;
  }
  __device__ float* scales() const { return floats(layout_.scales); }
  __device__ float* outputs() const { return floats(layout_.outputs); }
  __device__ char* scratch(int warp) const {
    return shared_ + layout_.scratch + warp * layout_.scratch_bytes;
  }

 private:
  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(shared_ + offset); }
  __device__ char* keys_at(int j) const { return shared_ + layout_.keys + j * layout_.key_bytes; }
  __device__ char* values_at(int j) const {
    return shared_ + layout_.values + j * layout_.value_bytes;
  }

  template <class M>
  __device__ static void load_row(const char* row, int lane, float (&x)[kPerLane]) {
    constexpr int kMost = 16 / sizeof(Act), kRun = M::kElems < kMost ? M::kElems : kMost;
#pragma unroll
    for (int c = 0; c < M::kChunks; ++c)
#pragma unroll
      for (int e = 0; e < M::kElems; e += kRun)
        load_elements<Act, kRun>(reinterpret_cast<const Act*>(row) + M::element(c, lane) + e,
                                 x + c * M::kElems + e);
  }

  // Rows of the slot, by their place there.
  __device__ char* ring_key(int row) const {
    const int bytes = launch_.key_heads * layout_.key_bytes;
    return static_cast<char*>(p_.state.ring_k) + b_.ring_row * bytes + row * bytes +
           b_.key_head * layout_.key_bytes;
  }
  __device__ char* ring_value(int row) const {
    const int bytes = launch_.heads * launch_.head_dim * int(sizeof(Act));
    return static_cast<char*>(p_.state.ring_v) + b_.ring_row * bytes + row * bytes +
           (b_.head * launch_.head_dim + b_.row) * int(sizeof(Act));
  }
  __device__ const char* window_row(const void* rows, int64_t stride, int i, int at) const {
    return static_cast<const char*>(rows) + ((b_.token + i) * stride + at) * sizeof(Act);
  }

  // Of a ring row.
  __device__ int64_t gate_index(int head, int j) const {
    return b_.ring_row * launch_.heads + b_.physical(j, layout_.rows) * launch_.heads + b_.head +
           head;
  }

  __device__ void fetch_keys() const {
    constexpr int kCopies = kState * sizeof(Act) / 16;
    const int at = threadIdx.x % kCopies * 16, bytes = launch_.key_heads * layout_.key_bytes;
    const char* const ring = ring_key(0) + at;
#pragma unroll 1
    for (int j = threadIdx.x / kCopies; j < b_.history; j += blockDim.x / kCopies)
      copy_async_16(keys_at(j) + at, ring + b_.physical(j, layout_.rows) * bytes);
#pragma unroll 1
    for (int i = threadIdx.x / kCopies; i < b_.window; i += blockDim.x / kCopies)
      copy_async_16(shared_ + layout_.queries + i * layout_.key_bytes + at,
                    window_row(p_.q, p_.q_stride, i, b_.key_head * kState) + at);
  }

  // A warp copies a row at a time.
  __device__ void fetch_values() const {
    const int lane = threadIdx.x % 32 * 16;
    const int bytes = launch_.heads * launch_.head_dim * int(sizeof(Act));
    const char* const ring = ring_value(0) + lane;
#pragma unroll 1
    for (int j = threadIdx.x / 32; j < b_.history; j += blockDim.x / 32) {
      const char* from = ring + b_.physical(j, layout_.rows) * bytes;
#pragma unroll 1
      for (int at = 0; at + lane < layout_.value_bytes; at += 32 * 16)
        copy_async_16(values_at(j) + lane + at, from + at);
    }
  }

  // The first threads take a row's values, the last ones its keys.
  __device__ void fetch_window() const {
    const bool keeps = !launch_.fold_all && p_.route != Route::kConventional;
#pragma unroll 1
    for (int i = 0; i < b_.window; ++i) {
      const int j = b_.history + i, row = b_.physical(j, layout_.rows);
      const int column = b_.head * launch_.head_dim + b_.row;
      copy_row(threadIdx.x, layout_.value_bytes, window_row(p_.v, p_.v_stride, i, column),
               values_at(j), keeps ? ring_value(row) : nullptr);
      copy_row(blockDim.x - 1 - threadIdx.x, layout_.key_bytes,
               window_row(p_.k, p_.k_stride, i, b_.key_head * kState), keys_at(j),
               b_.owns_key ? ring_key(row) : nullptr);
    }
  }
  __device__ static void copy_row(int thread, int bytes, const char* from, char* shared,
                                  char* ring) {
#pragma unroll 1
    for (int at = thread * 16; at < bytes; at += blockDim.x * 16) {
      const uint4 word = *reinterpret_cast<const uint4*>(from + at);
      *reinterpret_cast<uint4*>(shared + at) = word;
      if (ring) *reinterpret_cast<uint4*>(ring + at) = word;
    }
  }

  __device__ float channel_decay(float raw, float scale, float bias) const {
    const float x = raw + bias;
    if (p_.channel_gate.lower_bound < 0)
      return expf(p_.channel_gate.lower_bound / (1.0f + expf(scale * x)));
    return expf(scale * softplus(x));
  }

  // Four columns of a row of a head, as a thread forms them.
  struct Run {
    int head, row, column;
  };
  __device__ Run run_of(int n) const {
    constexpr int kRuns = kState / 4;
    const int line = n / kRuns, head = launch_.config.heads == 1 ? 0 : line / b_.rows;
    return {head, line - head * b_.rows, n % kRuns * 4};
  }

  __device__ void form_decays() const {
    constexpr int kBatch = 4;
    const int total = launch_.config.heads * b_.rows * (kState / 4);
#pragma unroll 1
    for (int first = threadIdx.x; first < total; first += kBatch * blockDim.x) {
      float raw[kBatch][4];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int n = first + u * blockDim.x;
        if (n < total) load_elements<Act, 4>(raw_gate(run_of(n)), raw[u]);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int n = first + u * blockDim.x;
        if (n < total) form_decay(run_of(n), raw[u]);
      }
    }
  }
  __device__ Act* ring_gate(const Run& run) const {
    return static_cast<Act*>(p_.state.ring_gate) +
           (b_.ring_row + b_.physical(run.row, layout_.rows)) * (launch_.heads * kState) +
           (b_.head + run.head) * kState + run.column;
  }
  __device__ const Act* raw_gate(const Run& run) const {
    if (run.row < b_.history) return ring_gate(run);
    return reinterpret_cast<const Act*>(window_row(p_.gate, p_.gate_stride, run.row - b_.history,
                                                   (b_.head + run.head) * kState + run.column));
  }
  __device__ void form_decay(const Run& run, const float (&raw)[4]) const {
    if (run.row >= b_.history && b_.owns_gates) store_elements<Act, 4>(ring_gate(run), raw);
    const int head = b_.head + run.head;
    float bias[4], a[4];
    load_elements<float, 4>(p_.channel_gate.bias + head * kState + run.column, bias);
    const float scale = p_.channel_gate.scale[head];
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e] = channel_decay(raw[e], scale, bias[e]);
    float* row =
        floats(layout_.decays) + (run.head * layout_.rows + run.row) * padded_width(kState);
    store_elements<float, 4>(row + padded_index(run.column), a);
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const StepLayout& layout_;
  const BlockPlace& b_;
  char* shared_;
};

}  // namespace replayssm::cuda
