// Long windows of Kimi Delta, token by token: a piece of the window at a time runs through the
// state, whose rows stay in registers meanwhile. The state is fp32 between the pieces.

#include <algorithm>
#include <cmath>

#include "core/dispatch.h"
#include "ops/cpu/recurrent_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/recurrent_prefill_kimi_delta.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/cpu/channel_gate-inl.h"
#include "ops/cpu/recurrent_output-inl.h"
#include "ops/cpu/recurrent_stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class ActT>
class PieceBlock {
 public:
  PieceBlock(const RecurrentStepParams& params, const Block& block, float* memory)
      : p_(params), block_(block), m_(memory, params.shape) {
    first_ = params.batch.query_start[block.sequence];
    window_ = params.batch.query_start[block.sequence + 1] - first_;
    slot_ = params.batch.slot[block.sequence];
  }

  void run() {
    if (slot_ < 0) return clear_outputs(p_, block_, first_, window_);
    if (window_ == 0) return;
    const int64_t heads = block_.head_end - block_.head_begin;
    for (int64_t h = 0; h < heads; ++h) load_state(h);
    for (int64_t t = 0; t < window_; t += kPiece) {
      token_ = first_ + t;
      count_ = std::min(kPiece, window_ - t);
      gather_keys();
      for (int64_t h = 0; h < heads; ++h) run_piece(h);
    }
    for (int64_t h = 0; h < heads; ++h) store_state(h);
  }

 private:
  int64_t state_size() const { return p_.shape.head_dim * p_.shape.state_dim; }
  float* state(int64_t h) const { return m_.state + h * state_size(); }

  void load_state(int64_t h) {
    dispatch_float(p_.state.checkpoint_dtype, [&]<class StateT>() {
      const StateT* checkpoint = static_cast<const StateT*>(p_.state.checkpoint) +
                                 (slot_ * p_.shape.heads + block_.head_begin + h) * state_size();
      ForVectors(D(), static_cast<size_t>(state_size()), [&](size_t i, auto n) {
        StoreF32N(LoadF32N(D(), checkpoint + i, n), D(), state(h) + i, n);
      });
    });
  }
  void store_state(int64_t h) {
    const HeadWriter writer(p_, slot_, slot_, block_.head_begin + h,
                            p_.batch.cursors[slot_].ring_start + window_);
    const int64_t size = p_.shape.state_dim;
    float* row = m_.step.fresh;
    for (int64_t r = 0; r < p_.shape.head_dim; ++r) {
      to_padded_floats(state(h) + r * size, size, m_.step.width, row);
      writer.write(r, 1, row, m_.step.width);
    }
  }

  void gather_keys() {
    const int64_t size = p_.shape.state_dim, offset = block_.key_head * size;
    const StepScratch& m = m_.step;
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t token = token_ + i;
      gather_key(true, static_cast<const ActT*>(p_.k) + token * p_.k_stride + offset, size, m.width,
                 m.k + i * m.width);
      gather_query(true, static_cast<const ActT*>(p_.q) + token * p_.q_stride + offset, size,
                   m.width, m.q + i * m.width);
    }
  }

  void run_piece(int64_t h) {
    const RecurrentShape& shape = p_.shape;
    const int64_t head = block_.head_begin + h;
    const StepScratch& m = m_.step;
    const HeadScratch& scratch = m.heads[h];
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t token = token_ + i;
      to_padded_floats(static_cast<const ActT*>(p_.v) + token * p_.v_stride + head * shape.head_dim,
                       shape.head_dim, m.height, scratch.v + i * m.height);
      channel_decays(
          static_cast<const ActT*>(p_.gate) + token * p_.gate_stride + head * shape.state_dim,
          shape.state_dim, m.width, p_.channel_gate, head, scratch.a + i * m.width);
      scratch.b[i] = p_.b[token * shape.heads + head];
    }
    const Replay replay{.rows = count_, .window = count_, .stored = count_, .replayed = count_};
    Prefetcher prefetcher;
    dispatch_width(shape.state_dim, [&]<size_t kVecs>() {
      stream_state<Family::kKimiDelta, true, kVecs>(replay, m, scratch, shape, state(h), nullptr,
                                                    prefetcher);
    });
    for (int64_t i = 0; i < count_; ++i)
      write_output<ActT>(p_, token_ + i, head, scratch.o + i * m.height);
  }

  const RecurrentStepParams& p_;
  const Block& block_;
  PieceScratch m_;
  int64_t slot_ = -1, first_ = 0, window_ = 0;
  int64_t token_ = 0, count_ = 0;  // the piece at hand
};

void prefill_block(const RecurrentPrefillParams& params, const Block& block, float* memory) {
  dispatch_float(params.state.activation_dtype,
                 [&]<class ActT>() { PieceBlock<ActT>(params, block, memory).run(); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm::cpu {

HWY_EXPORT(prefill_block);

PrefillKernel kimi_delta_prefill_kernel() { return HWY_DYNAMIC_DISPATCH(prefill_block); }

}  // namespace replayssm::cpu
#endif  // HWY_ONCE
