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
#include "ops/cpu/recurrent_stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

// The queries of the window walked back through the rows that are not in the checkpoint: leaves t
// and the coefficient c of every row. Heads are walked together: their chains hide each other's
// latencies.
template <Family kFamily, class Fetch>
void walk_back(const Replay& replay, const StepScratch& m, int64_t heads, Fetch&& fetch_ahead) {
  const D d;
  for (int64_t i = 0; i < replay.window; ++i) {
    const float* q = m.q + i * m.width;
    const int64_t last = replay.first_of_window() + i;
    if constexpr (kFamily == Family::kMamba2) {
      for (int64_t h = 0; h < heads; ++h) {
        const HeadScratch& head = m.heads[h];
        float decay = 1;
        for (int64_t j = last; j >= replay.stored; --j) {
          head.c[i * m.rows + j] = head.b[j] * (decay * m.kq[i * m.rows + j]);
          decay *= head.a[j];
        }
        for (int64_t x = 0; x < m.width; x += kLanes)
          hn::Store(hn::Mul(hn::Set(d, decay), hn::Load(d, q + x)), d, head.t + i * m.width + x);
      }
    } else {
      for (int64_t h = 0; h < heads; ++h) std::copy_n(q, m.width, m.heads[h].t + i * m.width);
      for (int64_t j = last; j >= replay.stored; --j) {
        const float* k = m.k + j * m.width;
        for (int64_t h = 0; h < heads; ++h) {
          fetch_ahead();
          const HeadScratch& head = m.heads[h];
          float* t = head.t + i * m.width;
          const auto c = hn::Mul(hn::Set(d, head.b[j]), dot_memory(t, k, m.width));
          head.c[i * m.rows + j] = hn::GetLane(c);
          for (int64_t x = 0; x < m.width; x += kLanes) {
            const auto rest = hn::NegMulAdd(c, hn::Load(d, k + x), hn::Load(d, t + x));
            hn::Store(hn::Mul(hn::Set(d, head.a[j]), rest), d, t + x);
          }
        }
      }
    }
  }
}

// The share of ring and window in the outputs: o = sum_j c_j v_j.
void mix_values(const Replay& replay, const StepScratch& m, const HeadScratch& head) {
  const D d;
  for (int64_t i = 0; i < replay.window; ++i) {
    const float* c = head.c + i * m.rows;
    for (int64_t x = 0; x < m.height; x += kLanes) {
      auto sum = hn::Zero(d);
      for (int64_t j = replay.stored; j <= replay.first_of_window() + i; ++j)
        sum = hn::MulAdd(hn::Set(d, c[j]), hn::Load(d, head.v + j * m.height + x), sum);
      hn::Store(sum, d, head.o + i * m.height + x);
    }
  }
}

template <class ActT>
class StepBlock {
 public:
  StepBlock(const RecurrentStepParams& params, const Block& block, float* memory,
            Prefetcher& prefetcher)
      : p_(params),
        block_(block),
        prefetcher_(prefetcher),
        m_(memory, params.shape, params.batch.ring) {
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

  // Asks for the rows of the ring that run() will read.
  void prefetch_ring() const {
    if (slot_ < 0) return;
    const int64_t heads = block_.head_end - block_.head_begin;
    for (int64_t j = 0; j < history(); ++j) {
      prefetch(ring_value(j, block_.head_begin), heads * p_.shape.head_dim);
      prefetch(ring_key(j), p_.shape.state_dim);
    }
  }

  void run() {
    if (slot_ < 0) return clear_outputs();
    if (replay_.rows == 0 || (replay_.window == 0 && replay_.stored == 0)) return;
    gather_keys();
    for (int64_t j = 0; j < replay_.rows; ++j) {
      gather_values(j);
      fetch_ahead();
    }
    const int64_t heads = block_.head_end - block_.head_begin;
    for (int64_t h = 0; h < heads; ++h) exponentials(replay_.rows, m_.heads[h].a);
    dispatch_family(p_.shape.family, [&]<Family kFamily>() {
      if (p_.route == Route::kOutputOnly) {
        walk_back<kFamily>(replay_, m_, heads, [&] { fetch_ahead(); });
        for (int64_t h = 0; h < heads; ++h) mix_values(replay_, m_, m_.heads[h]);
        for (int64_t h = 0; h < heads; ++h) stream<kFamily, false>(h);
      } else {
        for (int64_t h = 0; h < heads; ++h) stream<kFamily, true>(h);
      }
    });
    if (keeps_ring()) append();
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

  void* checkpoint(int64_t head) const {
    return static_cast<char*>(p_.state.checkpoint) + (slot_ * p_.shape.heads + head) *
                                                         p_.shape.head_dim * p_.shape.state_dim *
                                                         dtype_bytes(p_.state.checkpoint_dtype);
  }
  void fetch_ahead() {
    prefetcher_.computing(static_cast<const char*>(checkpoint(block_.head_begin)));
  }

  void clear_outputs() {
    for (int64_t i = 0; i < replay_.window; ++i) {
      std::fill_n(static_cast<float*>(p_.o) +
                      ((first_token_ + i) * p_.shape.heads + block_.head_begin) * p_.shape.head_dim,
                  (block_.head_end - block_.head_begin) * p_.shape.head_dim, 0.0f);
    }
  }

  void gather_keys() {
    const bool normalise = p_.shape.family == Family::kGatedDelta;
    const int64_t k = p_.shape.state_dim;
    for (int64_t j = 0; j < replay_.rows; ++j) {
      fetch_ahead();
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
          m_.kq[i * m_.rows + j] = hn::GetLane(dot_memory(m_.k + j * m_.width, q, m_.width));
      }
    }
  }

  // Row j of all heads of the block.
  void gather_values(int64_t j) {
    const int64_t v = p_.shape.head_dim;
    const bool in_ring = j < history();
    const int64_t token = (first_token_ + j - history()) * p_.shape.heads;
    const int64_t gate = in_ring ? ring_gate(j, 0) : token;
    const float* b = (in_ring ? p_.state.ring_b : p_.b) + gate;
    const float* g = (in_ring ? p_.state.ring_g : p_.g) + gate;
    for (int64_t head = block_.head_begin; head < block_.head_end; ++head) {
      const HeadScratch& scratch = m_.heads[head - block_.head_begin];
      const ActT* source = in_ring ? ring_value(j, head) : window_value(j - history(), head);
      to_padded_floats(source, v, m_.height, scratch.v + j * m_.height);
      scratch.b[j] = b[head];
      scratch.a[j] = g[head];
    }
  }

  template <Family kFamily, bool kReplayAll>
  void stream(int64_t h) {
    const auto& shape = p_.shape;
    const int64_t head = block_.head_begin + h;
    dispatch_float(p_.state.checkpoint_dtype, [&]<class StateT>() {
      StateT* state = static_cast<StateT*>(checkpoint(head));
      dispatch_width(shape.state_dim, [&]<size_t kVecs>() {
        stream_state<kFamily, kReplayAll, kVecs>(replay_, m_, m_.heads[h], shape, state,
                                                 prefetcher_);
      });
    });
    for (int64_t i = 0; i < replay_.window; ++i)
      std::copy_n(
          m_.heads[h].o + i * m_.height, shape.head_dim,
          static_cast<float*>(p_.o) + ((first_token_ + i) * shape.heads + head) * shape.head_dim);
  }

  // The window joins the ring as it came.
  void append() {
    const int64_t first = block_.head_begin, heads = block_.head_end - first;
    for (int64_t i = 0; i < replay_.window; ++i) {
      const int64_t j = history() + i, token = (first_token_ + i) * p_.shape.heads + first;
      std::copy_n(window_value(i, first), heads * p_.shape.head_dim, ring_value(j, first));
      std::copy_n(p_.b + token, heads, p_.state.ring_b + ring_gate(j, first));
      std::copy_n(p_.g + token, heads, p_.state.ring_g + ring_gate(j, first));
      if (block_.first_of_key_head)
        std::copy_n(window_key(p_.k, p_.k_stride, i), p_.shape.state_dim, ring_key(j));
    }
  }

  const RecurrentStepParams& p_;
  const Block block_;
  Prefetcher& prefetcher_;
  StepScratch m_;
  Replay replay_;
  int64_t slot_ = -1, first_token_ = 0, first_row_ = 0, ring_rows_ = 0;
};

// Blocks [begin, end) of the list.
void step_blocks(const RecurrentStepParams& params, const BlockList& blocks, int64_t begin,
                 int64_t end, float* memory) {
  Prefetcher prefetcher;
  dispatch_float(params.state.activation_dtype, [&]<class ActT>() {
    for (int64_t i = begin; i < end; ++i) {
      if (i + 1 < end) StepBlock<ActT>(params, blocks[i + 1], memory, prefetcher).prefetch_ring();
      StepBlock<ActT>(params, blocks[i], memory, prefetcher).run();
    }
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm::cpu {

HWY_EXPORT(step_blocks);

void recurrent_step(const RecurrentStepParams& params, void* workspace, ThreadPool& pool) {
  check_recurrent(params.shape, params.batch, params.state);
  const int64_t scratch = StepScratch(nullptr, params.shape, params.batch.ring).floats;
  const BlockList blocks(params.batch.sequences, params.shape, pool.size());
  const auto kernel = HWY_DYNAMIC_DISPATCH(step_blocks);
  pool.for_ranges(blocks.count(), [&](int64_t begin, int64_t end, int thread) {
    kernel(params, blocks, begin, end, static_cast<float*>(workspace) + thread * scratch);
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
