// Decode steps of the recurrence: a block of work is (sequence, key head, some of its value heads).
// Compiled once per family and instruction set (included after foreach_target.h).
//
// The keys of ring and window are converted (and, for the delta rules, normalised) once per block.
// Each value head then streams its state rows: rows are independent, so a fold runs the recurrence
// over all its tokens while some rows are in registers or close by, and stores them once.
#if defined(REPLAYSSM_OPS_CPU_RECURRENT_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_RECURRENT_STEP_INL_H_
#undef REPLAYSSM_OPS_CPU_RECURRENT_STEP_INL_H_
#else
#define REPLAYSSM_OPS_CPU_RECURRENT_STEP_INL_H_
#endif

#include <algorithm>
#include <concepts>
#include <cstring>

#include "core/dispatch.h"
#include "ops/cpu/channel_gate-inl.h"
#include "ops/cpu/recurrent_kernels.h"
#include "ops/cpu/recurrent_output-inl.h"
#include "ops/cpu/recurrent_read-inl.h"
#include "ops/cpu/recurrent_read_int8.h"
#include "ops/cpu/recurrent_rows.h"
#include "ops/cpu/recurrent_stream-inl.h"
#include "ops/cpu/recurrent_walk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

template <Family kFamily, class ActT>
class StepBlock {
 public:
  StepBlock(const StepCall& params, const Block& at, float* memory, Prefetcher& prefetcher)
      : p_(params),
        block_(at),
        rows_(params, at),
        replay_(rows_.replay),
        prefetcher_(prefetcher),
        m_(memory, params.shape, params.batch.ring) {}

  void run() {
    prefetcher_.begin(rows_.states());
    if (rows_.slot < 0) return clear_outputs(p_, block_, rows_.first_token, replay_.window);
    if (replay_.window == 0 && p_.batch.query_start != nullptr) return;
    if (rows_.target < 0) return;
    if (replay_.rows == 0) return copy_heads();
    gather_keys();
    for (int64_t j = 0; j < replay_.rows; ++j) {
      if (j % 2 == 0) prefetcher_.computing();
      gather_gates(j);
    }
    const int64_t heads = block_.head_end - block_.head_begin;
    if constexpr (kFamily != Family::kKimiDelta) {
      for (int64_t h = 0; h < heads; ++h) exponentials(replay_.rows, m_.heads[h].a);
    }
    if (reads_replayed()) {
      for (int64_t h = 0; h < heads; ++h) stream<true>(h);
    } else {
      walk_back<kFamily>(replay_, m_, heads, prefetcher_);
      for (int64_t h = 0; h < heads; ++h) mix_values(h);
      for (int64_t h = 0; h < heads; ++h) stream<false>(h);
    }
    if (rows_.keeps_ring()) append();
  }

 private:
  // Whether the outputs are read off the state behind each token, and not by walking back.
  bool reads_replayed() const { return replay_.window > 0 && replay_.replayed == replay_.rows; }

  void gather_keys() {
    for (int64_t j = 0; j < replay_.rows; ++j) {
      if (j % 2 == 0) prefetcher_.computing();
      gather_key(is_delta(kFamily), rows_.key(j), p_.shape.state_dim, m_.width,
                 m_.k + j * m_.width);
    }
    for (int64_t i = 0; i < replay_.window; ++i)
      gather_query(is_delta(kFamily), rows_.window_key(p_.q, p_.q_stride, i), p_.shape.state_dim,
                   m_.width, m_.q + i * m_.width);
  }

  // Row j of all heads of the block: gates, and the values of the rows that run through the state.
  void gather_gates(int64_t j) {
    const int64_t first = block_.head_begin, i = j - rows_.history();
    const bool in_ring = i < 0;
    const int64_t row = in_ring ? rows_.ring_scalar(j, first) : rows_.window_scalar(i, first);
    const float* b = (in_ring ? p_.state.ring_b : p_.b) + row;
    for (int64_t h = 0; h < block_.head_end - first; ++h) {
      const HeadScratch& scratch = m_.heads[h];
      if (j < replay_.replayed)
        gather_value<kFamily>(rows_.value(j, first + h), b[h], p_.shape.head_dim, m_.height,
                              scratch.v + j * m_.height);
      scratch.b[j] = b[h];
      if constexpr (kFamily == Family::kKimiDelta) {
        channel_decays(in_ring ? rows_.ring_gates(j, first + h) : rows_.window_gates(i, first + h),
                       p_.shape.state_dim, m_.width, p_.channel_gate, first + h,
                       scratch.a + j * m_.width);
      } else {
        scratch.a[j] = ((in_ring ? p_.state.ring_g : p_.g) + row)[h];
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
        m_.value[count] = rows_.value(j, block_.head_begin + h);
        m_.weight[count++] = head.c[i * m_.rows + j];
      }
      weighted_sum<ActT>(count, m_.weight, m_.value, p_.shape.head_dim, head.o + i * m_.height);
    }
  }

  template <bool kReplayAll>
  void stream(int64_t h) {
    const int64_t head = block_.head_begin + h;
    if (kReplayAll || replay_.replayed > 0) {
      replay<kReplayAll>(h, head);
    } else if (rows_.reads_copy()) {
      const ReadCopy& copy = p_.state.read_copy;
      dispatch_storage(copy.dtype, [&]<class T>() {
        read(h, StoredRows<T>(copy.data, copy.scale, p_.shape, rows_.slot, head));
      });
    } else {
      dispatch_float(p_.state.checkpoint_dtype, [&]<class T>() {
        read(h, StoredRows<T>(p_.state.checkpoint, nullptr, p_.shape, rows_.slot, head));
      });
    }
    for (int64_t i = 0; i < replay_.window; ++i)
      write_output<ActT>(p_, rows_.first_token + i, head, m_.heads[h].o + i * m_.height);
  }

  template <class T>
  void read(int64_t h, const StoredRows<T>& stored) {
    if constexpr (std::same_as<T, int8>) {
      if (read_bytes(h, stored)) return;
    }
    dispatch_width(p_.shape.state_dim, [&]<size_t kVecs>() {
      read_head<kVecs>(stored, replay_.window, m_, m_.heads[h], p_.shape, prefetcher_);
    });
  }
  bool read_bytes(int64_t h, const StoredRows<int8>& stored) {
    const Int8Rows rows{Codes(stored.data), stored.scale, p_.shape.head_dim, p_.shape.state_dim};
    const HeadScratch& head = m_.heads[h];
    for (int64_t i = 0; i < replay_.window; ++i) {
      if (!read_int8(rows, head.t + i * m_.width, head.o + i * m_.height, prefetcher_))
        return false;
    }
    return true;
  }
  template <bool kReplayAll>
  void replay(int64_t h, int64_t head) {
    if (rows_.reads_copy()) {
      const ReadCopy& copy = p_.state.read_copy;
      dispatch_storage(copy.dtype, [&]<class T>() {
        decode_head(StoredRows<T>(copy.data, copy.scale, p_.shape, rows_.slot, head), p_.shape,
                    m_.state);
      });
      return replay_from<kReplayAll>(h, m_.state, nullptr);
    }
    const HeadWriter writer(p_, rows_.slot, rows_.target, head, rows_.first_row + replay_.stored);
    dispatch_float(p_.state.checkpoint_dtype, [&]<class StateT>() {
      replay_from<kReplayAll>(h, static_cast<StateT*>(rows_.checkpoint(head)),
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

  // Nothing to fold: another rows_.slot gets what this one has, bit for bit.
  void copy_heads() const {
    if (rows_.target == rows_.slot) return;
    const RecurrentShape& shape = p_.shape;
    const auto copy = [&](void* data, int64_t bytes_of_head) {
      const int64_t bytes = (block_.head_end - block_.head_begin) * bytes_of_head;
      const auto at = [&](int64_t slot) {
        return static_cast<char*>(data) + (slot * shape.heads + block_.head_begin) * bytes_of_head;
      };
      std::memcpy(at(rows_.target), at(rows_.slot), static_cast<size_t>(bytes));
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
      const int64_t j = rows_.history() + i,
                    token = (rows_.first_token + i) * p_.shape.heads + first;
      std::copy_n(rows_.window_value(i, first), heads * p_.shape.head_dim,
                  rows_.ring_value(j, first));
      std::copy_n(p_.b + token, heads, p_.state.ring_b + rows_.ring_scalar(j, first));
      if constexpr (kFamily == Family::kKimiDelta) {
        std::copy_n(rows_.window_gates(i, first), heads * p_.shape.state_dim,
                    rows_.ring_gates(j, first));
      } else {
        std::copy_n(p_.g + token, heads, p_.state.ring_g + rows_.ring_scalar(j, first));
      }
      if (block_.first_of_key_head)
        std::copy_n(rows_.window_key(p_.k, p_.k_stride, i), p_.shape.state_dim, rows_.ring_key(j));
    }
  }

  const StepCall& p_;
  const Block block_;
  const BlockRows<kFamily, ActT> rows_;
  const Replay& replay_;
  Prefetcher& prefetcher_;
  StepScratch m_;
};

// What the blocks of an order read.
template <Family kFamily, class ActT>
class StepReads final : public ReadSource {
 public:
  StepReads(const StepCall& call, const BlockList& blocks, const BlockOrder& order)
      : call_(call), blocks_(blocks), inputs_(order), states_(order) {}

  bool next_inputs(InputReads& reads) override {
    const int64_t i = inputs_.next();
    if (i >= 0) reads = Rows(call_, blocks_[i]).inputs();
    return i >= 0;
  }
  bool next_state(StateReads& reads) override {
    const int64_t i = states_.next();
    if (i >= 0) reads = Rows(call_, blocks_[i]).states();
    return i >= 0;
  }

 private:
  using Rows = BlockRows<kFamily, ActT>;

  const StepCall& call_;
  const BlockList& blocks_;
  BlockOrder inputs_, states_;
};

// What a call reads of states, folds aside.
inline int64_t call_bytes(const StepCall& call) {
  const ReadCopy& copy = call.state.read_copy;
  const DType dtype = copy.data != nullptr ? copy.dtype : call.state.checkpoint_dtype;
  return call.batch.sequences * call.shape.heads * call.shape.head_dim * call.shape.state_dim *
         dtype_bytes(dtype);
}

// Blocks [begin, end) of the list.
template <Family kFamily>
void run_step_blocks(const StepCall& call, const BlockList& blocks, int64_t begin, int64_t end,
                     float* memory) {
  dispatch_float(call.state.activation_dtype, [&]<class ActT>() {
    BlockOrder order(blocks, call.batch, begin, end);
    StepReads<kFamily, ActT> reads(call, blocks, order);
    Prefetcher prefetcher(reads, (end - begin) * call_bytes(call) / blocks.count());
    for (int64_t i; (i = order.next()) >= 0;)
      StepBlock<kFamily, ActT>(call, blocks[i], memory, prefetcher).run();
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
