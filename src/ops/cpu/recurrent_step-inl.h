// Decode steps of the recurrence: a block of work is (sequence, key head, some of its value heads).
// Compiled once per family and instruction set (included after foreach_target.h).
//
// The keys of ring and window are converted (and, for the delta rules, normalised) once per block.
// Each value head then streams its state rows through registers: rows are independent, so a fold
// runs the recurrence over all its tokens while the row is in registers and stores it once.
#if defined(REPLAYSSM_OPS_CPU_RECURRENT_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_RECURRENT_STEP_INL_H_
#undef REPLAYSSM_OPS_CPU_RECURRENT_STEP_INL_H_
#else
#define REPLAYSSM_OPS_CPU_RECURRENT_STEP_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "core/dispatch.h"
#include "ops/cpu/channel_gate-inl.h"
#include "ops/cpu/recurrent_kernels.h"
#include "ops/cpu/recurrent_output-inl.h"
#include "ops/cpu/recurrent_read-inl.h"
#include "ops/cpu/recurrent_stream-inl.h"
#include "ops/cpu/recurrent_walk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

template <Family kFamily, class ActT>
class StepBlock {
 public:
  StepBlock(const StepCall& params, const Block& block, float* memory, Prefetcher& prefetcher)
      : p_(params),
        block_(block),
        prefetcher_(prefetcher),
        m_(memory, params.shape, params.batch.ring) {
    const auto& batch = params.batch;
    slot_ = batch.slot[block.sequence];
    first_token_ = batch.query_start ? batch.query_start[block.sequence] : 0;
    replay_.window = batch.query_start ? batch.query_start[block.sequence + 1] - first_token_ : 0;
    if (slot_ < 0) return;
    target_ = params.target_slot ? params.target_slot[block.sequence] : slot_;
    if (batch.parent != nullptr) find_tree(batch.parent + first_token_);
    ring_rows_ = ring_rows(batch.ring.buffer_len, batch.ring.max_window);
    const Cursor& cursor = batch.cursors[slot_];
    const bool fold_all = batch.query_start == nullptr;
    first_row_ = cursor.ring_start - cursor.fold_count;
    first_physical_ = first_row_ % ring_rows_;
    const int64_t history = cursor.fold_count + cursor.ring_count;
    replay_.rows = history + replay_.window;
    replay_.stored = fold_all ? history : cursor.fold_count;
    replay_.replayed = replay_.stored;
    if (fold_all || params.route == Route::kOutputOnly) return;
    if (params.route == Route::kConventional) replay_.stored = replay_.rows;
    replay_.replayed = replay_.parent ? history : replay_.rows;
  }

  // Asks for the part `part` of `parts` of what the ring of this sequence holds: as whole rows of
  // all heads, which lie together.
  void prefetch_ring(int64_t part, int64_t parts) const {
    if (slot_ < 0) return;
    const RecurrentShape& shape = p_.shape;
    for (int64_t j = history() * part / parts; j < history() * (part + 1) / parts; ++j) {
      prefetch(ring_value(j, 0), shape.heads * shape.head_dim);
      prefetch(ring_key(j) - block_.key_head * shape.state_dim, shape.key_heads * shape.state_dim);
      prefetch(p_.state.ring_b + ring_scalar(j, 0), shape.heads);
      if constexpr (kFamily == Family::kKimiDelta) {
        prefetch(ring_gates(j, 0), shape.heads * shape.state_dim);
      } else {
        prefetch(p_.state.ring_g + ring_scalar(j, 0), shape.heads);
      }
    }
  }

  void run() {
    if (slot_ < 0) return clear_outputs(p_, block_, first_token_, replay_.window);
    if (replay_.window == 0 && p_.batch.query_start != nullptr) return;
    if (target_ < 0) return;
    if (replay_.rows == 0) return copy_heads();
    gather_keys();
    for (int64_t j = 0; j < replay_.rows; ++j) {
      gather_gates(j);
      fetch_ahead();
    }
    const int64_t heads = block_.head_end - block_.head_begin;
    if constexpr (kFamily != Family::kKimiDelta) {
      for (int64_t h = 0; h < heads; ++h) exponentials(replay_.rows, m_.heads[h].a);
    }
    if (reads_replayed()) {
      for (int64_t h = 0; h < heads; ++h) stream<true>(h);
    } else {
      walk_back<kFamily>(replay_, m_, heads, [&] { fetch_ahead(); });
      for (int64_t h = 0; h < heads; ++h) mix_values(h);
      for (int64_t h = 0; h < heads; ++h) stream<false>(h);
    }
    if (keeps_ring()) append();
  }

 private:
  // Windows whose every token follows the one before are chains, parents or not.
  void find_tree(const int32_t* parent) {
    for (int64_t i = 0; i < replay_.window; ++i) {
      if (parent[i] != i - 1) replay_.parent = parent;
    }
  }

  int64_t history() const { return replay_.rows - replay_.window; }
  // Whether the outputs are read off the state behind each token, and not by walking back.
  bool reads_replayed() const { return replay_.window > 0 && replay_.replayed == replay_.rows; }
  bool keeps_ring() const { return p_.route != Route::kConventional && replay_.window > 0; }
  int64_t physical(int64_t j) const {
    const int64_t row = first_physical_ + j;
    return slot_ * ring_rows_ + (row < ring_rows_ ? row : row - ring_rows_);
  }

  ActT* ring_key(int64_t j) const {
    return static_cast<ActT*>(p_.state.ring_k) +
           (physical(j) * p_.shape.key_heads + block_.key_head) * p_.shape.state_dim;
  }
  ActT* ring_value(int64_t j, int64_t head) const {
    return static_cast<ActT*>(p_.state.ring_v) +
           (physical(j) * p_.shape.heads + head) * p_.shape.head_dim;
  }
  int64_t ring_scalar(int64_t j, int64_t head) const { return physical(j) * p_.shape.heads + head; }
  ActT* ring_gates(int64_t j, int64_t head) const {
    return static_cast<ActT*>(p_.state.ring_gate) + ring_scalar(j, head) * p_.shape.state_dim;
  }

  const ActT* window_key(const void* keys, int64_t stride, int64_t i) const {
    return static_cast<const ActT*>(keys) + (first_token_ + i) * stride +
           block_.key_head * p_.shape.state_dim;
  }
  const ActT* window_value(int64_t i, int64_t head) const {
    return static_cast<const ActT*>(p_.v) + (first_token_ + i) * p_.v_stride +
           head * p_.shape.head_dim;
  }

  const ActT* value(int64_t j, int64_t head) const {
    return j < history() ? ring_value(j, head) : window_value(j - history(), head);
  }
  const ActT* window_gates(int64_t i, int64_t head) const {
    return static_cast<const ActT*>(p_.gate) + (first_token_ + i) * p_.gate_stride +
           head * p_.shape.state_dim;
  }

  void* checkpoint(int64_t head) const {
    return static_cast<char*>(p_.state.checkpoint) + (slot_ * p_.shape.heads + head) *
                                                         p_.shape.head_dim * p_.shape.state_dim *
                                                         dtype_bytes(p_.state.checkpoint_dtype);
  }
  void fetch_ahead() {
    const char* state = static_cast<const char*>(checkpoint(block_.head_begin));
    if (reads_copy()) {
      const int64_t elements = p_.shape.head_dim * p_.shape.state_dim;
      state = static_cast<const char*>(p_.state.read_copy.data) +
              (slot_ * p_.shape.heads + block_.head_begin) * elements *
                  dtype_bytes(p_.state.read_copy.dtype);
    }
    prefetcher_.computing(state);
  }

  void gather_keys() {
    const int64_t k = p_.shape.state_dim;
    for (int64_t j = 0; j < replay_.rows; ++j) {
      fetch_ahead();
      const ActT* source =
          j < history() ? ring_key(j) : window_key(p_.k, p_.k_stride, j - history());
      to_padded_floats(source, k, m_.width, m_.k + j * m_.width);
      if constexpr (is_delta(kFamily)) l2_normalise(m_.width, 1.0f, m_.k + j * m_.width);
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(k));
    for (int64_t i = 0; i < replay_.window; ++i) {
      float* q = m_.q + i * m_.width;
      to_padded_floats(window_key(p_.q, p_.q_stride, i), k, m_.width, q);
      if constexpr (is_delta(kFamily)) l2_normalise(m_.width, scale, q);
    }
  }

  // Row j of all heads of the block: gates, and the values of the rows that run through the state.
  void gather_gates(int64_t j) {
    const bool in_ring = j < history();
    const int64_t i = j - history();
    const int64_t row = in_ring ? ring_scalar(j, 0) : (first_token_ + i) * p_.shape.heads;
    const float* b = (in_ring ? p_.state.ring_b : p_.b) + row;
    for (int64_t head = block_.head_begin; head < block_.head_end; ++head) {
      const HeadScratch& scratch = m_.heads[head - block_.head_begin];
      if (j < replay_.replayed)
        to_padded_floats(value(j, head), p_.shape.head_dim, m_.height, scratch.v + j * m_.height);
      scratch.b[j] = b[head];
      if constexpr (kFamily == Family::kKimiDelta) {
        channel_decays(in_ring ? ring_gates(j, head) : window_gates(i, head), p_.shape.state_dim,
                       m_.width, p_.channel_gate, head, scratch.a + j * m_.width);
      } else {
        scratch.a[j] = ((in_ring ? p_.state.ring_g : p_.g) + row)[head];
      }
    }
  }

  // The share of the walked rows in the outputs of head h: o = sum_j c_j v_j.
  void mix_values(int64_t h) {
    const HeadScratch& head = m_.heads[h];
    for (int64_t i = 0; i < replay_.window; ++i) {
      const int64_t last = replay_.first_of_window() + i;
      int64_t count = 0;
      for (int64_t j = last; j >= replay_.replayed; j = replay_.before(j)) {
        m_.value[count] = value(j, block_.head_begin + h);
        m_.weight[count++] = head.c[i * m_.rows + j];
      }
      weighted_sum<ActT>(count, m_.weight, m_.value, p_.shape.head_dim, head.o + i * m_.height);
    }
  }

  // Steps that fold nothing read the copy where there is one.
  bool reads_copy() const { return p_.state.read_copy.data != nullptr && replay_.stored == 0; }

  template <bool kReplayAll>
  void stream(int64_t h) {
    const int64_t head = block_.head_begin + h;
    if (kReplayAll || replay_.replayed > 0) {
      replay<kReplayAll>(h, head);
    } else if (reads_copy()) {
      const ReadCopy& copy = p_.state.read_copy;
      dispatch_storage(copy.dtype, [&]<class T>() {
        read(h, StoredRows<T>(copy.data, copy.scale, p_.shape, slot_, head));
      });
    } else {
      dispatch_float(p_.state.checkpoint_dtype, [&]<class T>() {
        read(h, StoredRows<T>(p_.state.checkpoint, nullptr, p_.shape, slot_, head));
      });
    }
    for (int64_t i = 0; i < replay_.window; ++i)
      write_output<ActT>(p_, first_token_ + i, head, m_.heads[h].o + i * m_.height);
  }

  template <class T>
  void read(int64_t h, const StoredRows<T>& stored) {
    dispatch_width(p_.shape.state_dim, [&]<size_t kVecs>() {
      read_head<kVecs>(stored, replay_.window, m_, m_.heads[h], p_.shape, prefetcher_);
    });
  }
  template <bool kReplayAll>
  void replay(int64_t h, int64_t head) {
    if (reads_copy()) {
      const ReadCopy& copy = p_.state.read_copy;
      dispatch_storage(copy.dtype, [&]<class T>() {
        decode_head(StoredRows<T>(copy.data, copy.scale, p_.shape, slot_, head), p_.shape,
                    m_.state);
      });
      return replay_from<kReplayAll>(h, m_.state, nullptr);
    }
    const HeadWriter writer(p_, slot_, target_, head, first_row_ + replay_.stored);
    dispatch_float(p_.state.checkpoint_dtype, [&]<class StateT>() {
      replay_from<kReplayAll>(h, static_cast<StateT*>(checkpoint(head)),
                              writer.is_plain() ? nullptr : &writer);
    });
  }
  template <bool kReplayAll, class StateT>
  void replay_from(int64_t h, StateT* state, const HeadWriter* writer) {
    dispatch_width(p_.shape.state_dim, [&]<size_t kVecs>() {
      stream_state<kFamily, kReplayAll, kVecs>(replay_, m_, m_.heads[h], p_.shape, state, writer,
                                               prefetcher_);
    });
  }

  // Nothing to fold: another slot gets what this one has, bit for bit.
  void copy_heads() const {
    if (target_ == slot_) return;
    const RecurrentShape& shape = p_.shape;
    const auto copy = [&](void* data, int64_t bytes_of_head) {
      const int64_t bytes = (block_.head_end - block_.head_begin) * bytes_of_head;
      const auto at = [&](int64_t slot) {
        return static_cast<char*>(data) + (slot * shape.heads + block_.head_begin) * bytes_of_head;
      };
      std::memcpy(at(target_), at(slot_), static_cast<size_t>(bytes));
    };
    const int64_t elements = shape.head_dim * shape.state_dim;
    const ReadCopy& read = p_.state.read_copy;
    copy(p_.state.checkpoint, elements * dtype_bytes(p_.state.checkpoint_dtype));
    if (read.data == nullptr) return;
    copy(read.data, elements * dtype_bytes(read.dtype));
    if (dtype_bytes(read.dtype) == 1)
      copy(read.scale, shape.head_dim * static_cast<int64_t>(sizeof(float)));
  }

  // The window joins the ring as it came.
  void append() {
    const int64_t first = block_.head_begin, heads = block_.head_end - first;
    for (int64_t i = 0; i < replay_.window; ++i) {
      const int64_t j = history() + i, token = (first_token_ + i) * p_.shape.heads + first;
      std::copy_n(window_value(i, first), heads * p_.shape.head_dim, ring_value(j, first));
      std::copy_n(p_.b + token, heads, p_.state.ring_b + ring_scalar(j, first));
      if constexpr (kFamily == Family::kKimiDelta) {
        std::copy_n(window_gates(i, first), heads * p_.shape.state_dim, ring_gates(j, first));
      } else {
        std::copy_n(p_.g + token, heads, p_.state.ring_g + ring_scalar(j, first));
      }
      if (block_.first_of_key_head)
        std::copy_n(window_key(p_.k, p_.k_stride, i), p_.shape.state_dim, ring_key(j));
    }
  }

  const StepCall& p_;
  const Block block_;
  Prefetcher& prefetcher_;
  StepScratch m_;
  Replay replay_;
  int64_t slot_ = -1, target_ = -1, first_token_ = 0, ring_rows_ = 0;
  int64_t first_row_ = 0, first_physical_ = 0;  // of the oldest row: its counter, its place
};

// Blocks [begin, end) of the list.
template <Family kFamily>
void run_step_blocks(const StepCall& call, const BlockList& blocks, int64_t begin, int64_t end,
                     float* memory) {
  Prefetcher prefetcher;
  dispatch_float(call.state.activation_dtype, [&]<class ActT>() {
    using Step = StepBlock<kFamily, ActT>;
    for (int64_t i = begin; i < end; ++i) {
      // The ring of the next sequence is fetched bit by bit while this one is computed.
      const int64_t parts = blocks.per_sequence(), next = (i / parts + 1) * parts;
      if (next < end) Step(call, blocks[next], memory, prefetcher).prefetch_ring(i % parts, parts);
      Step(call, blocks[i], memory, prefetcher).run();
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
