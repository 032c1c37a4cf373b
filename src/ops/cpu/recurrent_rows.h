// Where a block's rows lie: those of the ring, those of the window, and the state.
#pragma once

#include <cstdint>

#include "ops/cpu/recurrent_blocks.h"
#include "ops/cpu/recurrent_kernels.h"
#include "ops/cpu/recurrent_prefetch.h"
#include "replay/cursor.h"
#include "replayssm/ops.h"

namespace replayssm::cpu {

// ActT: the activation type.
template <Family kFamily, class ActT>
class BlockRows {
 public:
  BlockRows(const StepCall& params, const Block& at) : p(params), block(at) {
    const auto& batch = p.batch;
    slot = batch.slot[block.sequence];
    first_token = batch.query_start ? batch.query_start[block.sequence] : 0;
    replay.window = batch.query_start ? batch.query_start[block.sequence + 1] - first_token : 0;
    if (slot < 0) return;
    target = p.target_slot ? p.target_slot[block.sequence] : slot;
    if (batch.parent != nullptr) find_tree(batch.parent + first_token);
    ring_rows_ = ring_rows(batch.ring.buffer_len, batch.ring.max_window);
    const Cursor& cursor = batch.cursors[slot];
    const bool fold_all = batch.query_start == nullptr;
    first_row = cursor.ring_start - cursor.fold_count;
    first_physical_ = first_row % ring_rows_;
    const int64_t history = cursor.fold_count + cursor.ring_count;
    replay.rows = history + replay.window;
    replay.stored = fold_all ? history : cursor.fold_count;
    replay.replayed = replay.stored;
    if (fold_all || p.route == Route::kOutputOnly) return;
    if (p.route == Route::kConventional) replay.stored = replay.rows;
    replay.replayed = replay.parent ? history : replay.rows;
  }

  int64_t history() const { return replay.rows - replay.window; }
  bool keeps_ring() const { return p.route != Route::kConventional && replay.window > 0; }
  // Steps that fold nothing read the copy where there is one.
  bool reads_copy() const { return p.state.read_copy.data != nullptr && replay.stored == 0; }

  ActT* ring_key(int64_t j) const {
    return static_cast<ActT*>(p.state.ring_k) +
           (physical(j) * p.shape.key_heads + block.key_head) * p.shape.state_dim;
  }
  ActT* ring_value(int64_t j, int64_t head) const {
    return static_cast<ActT*>(p.state.ring_v) + ring_scalar(j, head) * p.shape.head_dim;
  }
  int64_t ring_scalar(int64_t j, int64_t head) const { return physical(j) * p.shape.heads + head; }
  ActT* ring_gates(int64_t j, int64_t head) const {
    return static_cast<ActT*>(p.state.ring_gate) + ring_scalar(j, head) * p.shape.state_dim;
  }

  const ActT* window_key(const void* keys, int64_t stride, int64_t i) const {
    return static_cast<const ActT*>(keys) + (first_token + i) * stride +
           block.key_head * p.shape.state_dim;
  }
  const ActT* window_value(int64_t i, int64_t head) const {
    return static_cast<const ActT*>(p.v) + (first_token + i) * p.v_stride + head * p.shape.head_dim;
  }
  int64_t window_scalar(int64_t i, int64_t head) const {
    return (first_token + i) * p.shape.heads + head;
  }
  const ActT* window_gates(int64_t i, int64_t head) const {
    return static_cast<const ActT*>(p.gate) + (first_token + i) * p.gate_stride +
           head * p.shape.state_dim;
  }

  // Of ring and window, oldest first.
  const ActT* key(int64_t j) const {
    return j < history() ? ring_key(j) : window_key(p.k, p.k_stride, j - history());
  }
  const ActT* value(int64_t j, int64_t head) const {
    return j < history() ? ring_value(j, head) : window_value(j - history(), head);
  }

  void* checkpoint(int64_t head) const {
    return static_cast<char*>(p.state.checkpoint) +
           (slot * p.shape.heads + head) * head_elements() * dtype_bytes(p.state.checkpoint_dtype);
  }

  // The rows that a block writes count as read: they are in the cache when their time comes.
  InputReads inputs() const {
    if (slot < 0) return {};
    return {ring_reads(), window_reads()};
  }

  StateReads states() const {
    StateReads reads;
    if (slot < 0 || replay.rows == 0) return reads;
    const int64_t row = (slot * p.shape.heads + block.head_begin) * p.shape.head_dim;
    const int64_t rows = (block.head_end - block.head_begin) * p.shape.head_dim;
    const ReadCopy& copy = p.state.read_copy;
    const bool reads_it = reads_copy();
    const int64_t row_bytes =
        p.shape.state_dim * dtype_bytes(reads_it ? copy.dtype : p.state.checkpoint_dtype);
    const void* all = reads_it ? copy.data : p.state.checkpoint;
    reads.data = static_cast<const char*>(all) + row * row_bytes;
    reads.bytes = rows * row_bytes;
    if (reads_it && dtype_bytes(copy.dtype) == 1) {
      reads.scales = reinterpret_cast<const char*>(copy.scale + row);
      reads.scale_bytes = rows * static_cast<int64_t>(sizeof(float));
    }
    return reads;
  }

  const StepCall& p;
  const Block block;
  Replay replay;
  int64_t slot = -1, target = -1, first_token = 0;
  int64_t first_row = 0;  // the counter of the oldest row

 private:
  static constexpr int64_t kElement = sizeof(ActT);

  RowReads ring_reads() const {
    RowReads ring;
    ring.rows = history() + (keeps_ring() ? replay.window : 0);
    if (ring.rows == 0) return ring;
    ring.first = first_physical_;
    ring.wrap = ring_rows_;
    const RecurrentShape& s = p.shape;
    const int64_t row0 = slot * ring_rows_, heads = block.head_end - block.head_begin;
    const auto add_of_heads = [&](const auto* all, int64_t of_head) {
      const int64_t bytes = of_head * static_cast<int64_t>(sizeof(*all));
      ring.add(all + (row0 * s.heads + block.head_begin) * of_head, s.heads * bytes, heads * bytes);
    };
    ring.add(static_cast<const ActT*>(p.state.ring_k) +
                 (row0 * s.key_heads + block.key_head) * s.state_dim,
             s.key_heads * s.state_dim * kElement, s.state_dim * kElement);
    add_of_heads(static_cast<const ActT*>(p.state.ring_v), s.head_dim);
    add_of_heads(p.state.ring_b, 1);
    if constexpr (kFamily == Family::kKimiDelta) {
      add_of_heads(static_cast<const ActT*>(p.state.ring_gate), s.state_dim);
    } else {
      add_of_heads(p.state.ring_g, 1);
    }
    return ring;
  }

  RowReads window_reads() const {
    RowReads window;
    window.rows = replay.window;
    if (window.rows == 0) return window;
    const int64_t keys = p.shape.state_dim * kElement;
    const int64_t values = (block.head_end - block.head_begin) * p.shape.head_dim * kElement;
    window.add(window_key(p.k, p.k_stride, 0), p.k_stride * kElement, keys);
    window.add(window_key(p.q, p.q_stride, 0), p.q_stride * kElement, keys);
    window.add(window_value(0, block.head_begin), p.v_stride * kElement, values);
    return window;
  }

  // Windows whose every token follows the one before are chains, parents or not.
  void find_tree(const int32_t* parent) {
    for (int64_t i = 0; i < replay.window; ++i) {
      if (parent[i] != i - 1) replay.parent = parent;
    }
  }

  int64_t head_elements() const { return p.shape.head_dim * p.shape.state_dim; }
  int64_t physical(int64_t j) const {
    const int64_t row = first_physical_ + j;
    return slot * ring_rows_ + (row < ring_rows_ ? row : row - ring_rows_);
  }

  int64_t ring_rows_ = 0, first_physical_ = 0;  // of the oldest row: its place
};

}  // namespace replayssm::cpu
