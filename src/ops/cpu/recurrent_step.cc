// Decode steps of the recurrence: a block of work is (sequence, key head, some of its value heads).
//
// The keys of ring and window are converted (and, for the gated delta rule, normalised) once per
// block. Each value head then streams its state rows through registers: rows are independent, so a
// fold runs the recurrence over all its tokens while the row is in registers and stores it once.

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/dispatch.h"
#include "ops/cpu/recurrent.h"
#include "ops/cpu/recurrent_blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/recurrent_step.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/cpu/recurrent-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

// The rows that a block replays, oldest first: ring rows, then the window.
struct Replay {
  int64_t rows = 0;    // all of them
  int64_t window = 0;  // the last ones: this step's tokens
  int64_t stored = 0;  // the first ones: their effect goes into the checkpoint
};

// s <- the recurrence's next state for kRows rows that share k.
template <Family kFamily, size_t kVecs, size_t kRows>
HWY_INLINE void update_rows(float a, float b, const float* v, const float* k,
                            const RowWidth<kVecs>& width, Row<kVecs>* s) {
  const D d;
  const auto decay = hn::Set(d, a);
  V write[kRows];
  if constexpr (kFamily == Family::kMamba2) {
    for (size_t r = 0; r < kRows; ++r) write[r] = hn::Set(d, b * v[r]);
    for (size_t i = 0; i < width.vecs(); ++i) {
      const auto key = hn::Load(d, k + i * kLanes);
      for (size_t r = 0; r < kRows; ++r)
        s[r].v[i] = hn::MulAdd(write[r], key, hn::Mul(decay, s[r].v[i]));
    }
  } else {
    for (size_t i = 0; i < width.vecs(); ++i) {
      for (size_t r = 0; r < kRows; ++r) s[r].v[i] = hn::Mul(decay, s[r].v[i]);
    }
    for (size_t r = 0; r < kRows; ++r) {
      const auto known = dot(s[r], k, width);
      write[r] = hn::Mul(hn::Set(d, b), hn::Sub(hn::Set(d, v[r]), known));
    }
    for (size_t i = 0; i < width.vecs(); ++i) {
      const auto key = hn::Load(d, k + i * kLanes);
      for (size_t r = 0; r < kRows; ++r) s[r].v[i] = hn::MulAdd(write[r], key, s[r].v[i]);
    }
  }
}

// Replays every row in registers, stores the state after `stored` of them, reads the outputs of the
// window off the states: the conventional and the state_and_output routes.
template <Family kFamily, size_t kVecs, size_t kRows, class StateT>
HWY_INLINE void replay_rows(const Replay& replay, const StepScratch& m,
                            const RowWidth<kVecs>& width, int64_t state_dim, StateT* state,
                            int64_t row) {
  Row<kVecs> s[kRows];
  for (size_t r = 0; r < kRows; ++r) load_row(state + (row + r) * state_dim, width, s[r]);
  const int64_t first = replay.rows - replay.window;
  for (int64_t j = 0; j < replay.rows; ++j) {
    update_rows<kFamily, kVecs, kRows>(m.a[j], m.b[j], m.v + j * m.height + row, m.k + j * m.width,
                                       width, s);
    if (j >= first) {
      float* o = m.o + (j - first) * m.height + row;
      for (size_t r = 0; r < kRows; ++r)
        o[r] = hn::GetLane(dot(s[r], m.q + (j - first) * m.width, width));
    }
    if (j + 1 == replay.stored) {
      for (size_t r = 0; r < kRows; ++r) store_row(s[r], width, state + (row + r) * state_dim);
    }
  }
}

// Folds the first `stored` rows, then adds S t to every output of the window: the output_only
// route.
template <Family kFamily, size_t kVecs, size_t kRows, class StateT>
HWY_INLINE void read_rows(const Replay& replay, const StepScratch& m, const RowWidth<kVecs>& width,
                          int64_t state_dim, StateT* state, int64_t row) {
  Row<kVecs> s[kRows];
  for (size_t r = 0; r < kRows; ++r) load_row(state + (row + r) * state_dim, width, s[r]);
  if (replay.stored > 0) {
    for (int64_t j = 0; j < replay.stored; ++j)
      update_rows<kFamily, kVecs, kRows>(m.a[j], m.b[j], m.v + j * m.height + row,
                                         m.k + j * m.width, width, s);
    for (size_t r = 0; r < kRows; ++r) store_row(s[r], width, state + (row + r) * state_dim);
  }
  for (int64_t i = 0; i < replay.window; ++i) {
    float* o = m.o + i * m.height + row;
    for (size_t r = 0; r < kRows; ++r) o[r] += hn::GetLane(dot(s[r], m.t + i * m.width, width));
  }
}

template <Family kFamily, size_t kVecs, class StateT>
void stream_state(bool replay_all, const Replay& replay, const StepScratch& m,
                  const RecurrentShape& shape, StateT* state) {
  // Two rows at a time hide each other's latencies as long as both fit into the registers.
  constexpr size_t kRows = kVecs > 0 && 2 * kVecs <= (kLanes == 16 ? 16 : 8) ? 2 : 1;
  const RowWidth<kVecs> width(shape.state_dim);
  const int64_t k = shape.state_dim;
  int64_t row = 0;
  if (replay_all) {
    for (; row + static_cast<int64_t>(kRows) <= shape.head_dim; row += kRows)
      replay_rows<kFamily, kVecs, kRows>(replay, m, width, k, state, row);
    for (; row < shape.head_dim; ++row)
      replay_rows<kFamily, kVecs, 1>(replay, m, width, k, state, row);
  } else {
    for (; row + static_cast<int64_t>(kRows) <= shape.head_dim; row += kRows)
      read_rows<kFamily, kVecs, kRows>(replay, m, width, k, state, row);
    for (; row < shape.head_dim; ++row)
      read_rows<kFamily, kVecs, 1>(replay, m, width, k, state, row);
  }
}

// The query of window token i walked back through the rows that are not in the checkpoint: leaves t
// and the outputs' share of ring and window.
template <Family kFamily>
void walk_back(const Replay& replay, const StepScratch& m, int64_t i) {
  const D d;
  const int64_t rows = replay.rows;
  float* c = m.c + i * rows;
  float* t = m.t + i * m.width;
  const float* q = m.q + i * m.width;
  const int64_t last = rows - replay.window + i;
  if constexpr (kFamily == Family::kMamba2) {
    float decay = 1;
    for (int64_t j = last; j >= replay.stored; --j) {
      c[j] = m.b[j] * (decay * m.kq[i * rows + j]);
      decay *= m.a[j];
    }
    for (int64_t x = 0; x < m.width; x += kLanes)
      hn::Store(hn::Mul(hn::Set(d, decay), hn::Load(d, q + x)), d, t + x);
  } else {
    std::copy_n(q, m.width, t);
    for (int64_t j = last; j >= replay.stored; --j) {
      const float* k = m.k + j * m.width;
      const auto cj = hn::Mul(hn::Set(d, m.b[j]), dot_memory(t, k, m.width));
      c[j] = hn::GetLane(cj);
      for (int64_t x = 0; x < m.width; x += kLanes) {
        const auto rest = hn::NegMulAdd(cj, hn::Load(d, k + x), hn::Load(d, t + x));
        hn::Store(hn::Mul(hn::Set(d, m.a[j]), rest), d, t + x);
      }
    }
  }
  float* o = m.o + i * m.height;
  for (int64_t x = 0; x < m.height; x += kLanes) {
    auto sum = hn::Zero(d);
    for (int64_t j = replay.stored; j <= last; ++j)
      sum = hn::MulAdd(hn::Set(d, c[j]), hn::Load(d, m.v + j * m.height + x), sum);
    hn::Store(sum, d, o + x);
  }
}

template <class ActT>
class StepBlock {
 public:
  StepBlock(const RecurrentStepParams& params, const Block& block, float* memory)
      : p_(params), block_(block), m_(memory, params.shape, params.batch.ring) {
    const auto& batch = params.batch;
    slot_ = batch.slot[block.sequence];
    first_token_ = batch.query_start ? batch.query_start[block.sequence] : 0;
    replay_.window = batch.query_start ? batch.query_start[block.sequence + 1] - first_token_ : 0;
    if (slot_ < 0) return;
    ring_rows_ = ring_rows(batch.ring.buffer_len, batch.ring.max_window);
    const Cursor& cursor = batch.cursors[slot_];
    const bool fold_all = batch.query_start == nullptr;
    first_row_ = cursor.ring_start - cursor.fold_count;
    const int64_t history = cursor.fold_count + cursor.ring_count;
    replay_.rows = history + replay_.window;
    replay_.stored = fold_all ? history : cursor.fold_count;
    if (!fold_all && params.route == Route::kConventional) replay_.stored = replay_.rows;
  }

  void run() {
    if (slot_ < 0) return clear_outputs();
    if (replay_.rows == 0 || (replay_.window == 0 && replay_.stored == 0)) return;
    gather_keys();
    for (int64_t head = block_.head_begin; head < block_.head_end; ++head) run_head(head);
    if (keeps_ring() && block_.first_of_key_head) {
      for (int64_t i = 0; i < replay_.window; ++i)
        std::copy_n(window_key(p_.k, p_.k_stride, i), p_.shape.state_dim, ring_key(history() + i));
    }
  }

 private:
  int64_t history() const { return replay_.rows - replay_.window; }
  bool keeps_ring() const { return p_.route != Route::kConventional && replay_.window > 0; }
  int64_t physical(int64_t j) const { return slot_ * ring_rows_ + (first_row_ + j) % ring_rows_; }

  ActT* ring_key(int64_t j) const {
    return static_cast<ActT*>(p_.state.ring_k) +
           (physical(j) * p_.shape.key_heads + block_.key_head) * p_.shape.state_dim;
  }
  ActT* ring_value(int64_t j, int64_t head) const {
    return static_cast<ActT*>(p_.state.ring_v) +
           (physical(j) * p_.shape.heads + head) * p_.shape.head_dim;
  }
  int64_t ring_gate(int64_t j, int64_t head) const { return physical(j) * p_.shape.heads + head; }

  const ActT* window_key(const void* keys, int64_t stride, int64_t i) const {
    return static_cast<const ActT*>(keys) + (first_token_ + i) * stride +
           block_.key_head * p_.shape.state_dim;
  }
  const ActT* window_value(int64_t i, int64_t head) const {
    return static_cast<const ActT*>(p_.v) + (first_token_ + i) * p_.v_stride +
           head * p_.shape.head_dim;
  }

  void clear_outputs() {
    for (int64_t i = 0; i < replay_.window; ++i) {
      std::fill_n(
          p_.o + ((first_token_ + i) * p_.shape.heads + block_.head_begin) * p_.shape.head_dim,
          (block_.head_end - block_.head_begin) * p_.shape.head_dim, 0.0f);
    }
  }

  void gather_keys() {
    const bool normalise = p_.shape.family == Family::kGatedDelta;
    const int64_t k = p_.shape.state_dim;
    for (int64_t j = 0; j < replay_.rows; ++j) {
      const ActT* source =
          j < history() ? ring_key(j) : window_key(p_.k, p_.k_stride, j - history());
      to_padded_floats(source, k, m_.width, m_.k + j * m_.width);
      if (normalise) l2_normalise(m_.width, 1.0f, m_.k + j * m_.width);
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(k));
    for (int64_t i = 0; i < replay_.window; ++i) {
      float* q = m_.q + i * m_.width;
      to_padded_floats(window_key(p_.q, p_.q_stride, i), k, m_.width, q);
      if (normalise) {
        l2_normalise(m_.width, scale, q);
      } else if (p_.route == Route::kOutputOnly) {
        for (int64_t j = replay_.stored; j <= history() + i; ++j)
          m_.kq[i * replay_.rows + j] = hn::GetLane(dot_memory(m_.k + j * m_.width, q, m_.width));
      }
    }
  }

  void gather_head(int64_t head) {
    const int64_t heads = p_.shape.heads, v = p_.shape.head_dim;
    for (int64_t j = 0; j < history(); ++j) {
      to_padded_floats(ring_value(j, head), v, m_.height, m_.v + j * m_.height);
      m_.b[j] = p_.state.ring_b[ring_gate(j, head)];
      m_.a[j] = p_.state.ring_g[ring_gate(j, head)];
    }
    for (int64_t i = 0; i < replay_.window; ++i) {
      const int64_t j = history() + i, gate = (first_token_ + i) * heads + head;
      to_padded_floats(window_value(i, head), v, m_.height, m_.v + j * m_.height);
      m_.b[j] = p_.b[gate];
      m_.a[j] = p_.g[gate];
      if (!keeps_ring()) continue;
      std::copy_n(window_value(i, head), v, ring_value(j, head));
      p_.state.ring_b[ring_gate(j, head)] = p_.b[gate];
      p_.state.ring_g[ring_gate(j, head)] = p_.g[gate];
    }
    exponentials(replay_.rows, m_.a);
  }

  void run_head(int64_t head) {
    gather_head(head);
    const auto& shape = p_.shape;
    const bool replay_all = p_.route != Route::kOutputOnly;
    dispatch_family(shape.family, [&]<Family kFamily>() {
      if (!replay_all) {
        for (int64_t i = 0; i < replay_.window; ++i) walk_back<kFamily>(replay_, m_, i);
      }
      dispatch_float(p_.state.checkpoint_dtype, [&]<class StateT>() {
        StateT* state = static_cast<StateT*>(p_.state.checkpoint) +
                        (slot_ * shape.heads + head) * shape.head_dim * shape.state_dim;
        dispatch_width(shape.state_dim, [&]<size_t kVecs>() {
          stream_state<kFamily, kVecs>(replay_all, replay_, m_, shape, state);
        });
      });
    });
    for (int64_t i = 0; i < replay_.window; ++i) {
      std::copy_n(m_.o + i * m_.height, shape.head_dim,
                  p_.o + ((first_token_ + i) * shape.heads + head) * shape.head_dim);
    }
  }

  const RecurrentStepParams& p_;
  const Block& block_;
  StepScratch m_;
  Replay replay_;
  int64_t slot_ = -1, first_token_ = 0, first_row_ = 0, ring_rows_ = 0;
};

void step_block(const RecurrentStepParams& params, const Block& block, float* memory) {
  dispatch_float(params.state.activation_dtype,
                 [&]<class ActT>() { StepBlock<ActT>(params, block, memory).run(); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm::cpu {

HWY_EXPORT(step_block);

void recurrent_step(const RecurrentStepParams& params, void* workspace, ThreadPool& pool) {
  check_recurrent(params.shape, params.batch, params.state);
  const int64_t scratch = StepScratch(nullptr, params.shape, params.batch.ring).floats;
  const BlockList blocks(params.batch.sequences, params.shape, pool.size(), params.shape.heads);
  const auto kernel = HWY_DYNAMIC_DISPATCH(step_block);
  pool.for_ranges(blocks.count(), [&](int64_t begin, int64_t end, int thread) {
    float* memory = static_cast<float*>(workspace) + thread * scratch;
    for (int64_t i = begin; i < end; ++i) kernel(params, blocks[i], memory);
  });
}

void recurrent_fold(const RecurrentFoldParams& params, void* workspace, ThreadPool& pool) {
  RecurrentStepParams step;
  step.shape = params.shape;
  step.batch = params.batch;
  step.batch.query_start = nullptr;
  step.state = params.state;
  recurrent_step(step, workspace, pool);
}

}  // namespace replayssm::cpu
#endif  // HWY_ONCE
