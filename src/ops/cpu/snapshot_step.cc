// Speculative decoding by snapshots: a row of the state is updated in registers token by token, and
// after every token stored past the caches, for nothing will read it soon.

#include <algorithm>
#include <cmath>

#include "core/dispatch.h"
#include "ops/check_params.h"
#include "ops/cpu/recurrent.h"
#include "ops/cpu/recurrent_blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/snapshot_step.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/cpu/channel_gate-inl.h"
#include "ops/cpu/recurrent_output-inl.h"
#include "ops/cpu/recurrent_stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

HWY_INLINE void stream_vector(V v, float* p) { hn::Stream(v, D(), p); }
template <class T>
HWY_INLINE void stream_vector(V v, T* p) {
  hn::Stream(replayssm::HWY_NAMESPACE::Narrow(D(), v, T()), hn::Rebind<uint16_t, D>(), &p->bits);
}

// Whether every vector of every row of a state at `data` may be stored past the caches.
template <size_t kVecs, class StateT>
bool streams(const StateT* data) {
  return kVecs > 0 && reinterpret_cast<uintptr_t>(data) % (kLanes * sizeof(StateT)) == 0;
}

template <size_t kVecs, class StateT>
HWY_INLINE void store_snapshot(const Row<kVecs>& row, const RowWidth<kVecs>& width, bool past_cache,
                               StateT* p) {
  if (!past_cache) return store_row(row, width, p);
  for (size_t i = 0; i < kVecs; ++i) stream_vector(row.v[i], p + i * kLanes);
}

// The state of one head: where it comes from, and where it goes after each token.
template <class StateT>
struct Snapshots {
  const StateT* from;
  StateT* to;
  int64_t stride;  // from token to token
  int64_t tokens;
};

template <Family kFamily, size_t kVecs, size_t kRows, class StateT>
HWY_INLINE void snapshot_rows(const Snapshots<StateT>& s, const StepScratch& m,
                              const HeadScratch& head, const RowWidth<kVecs>& width,
                              int64_t state_dim, int64_t row, bool past_cache,
                              Prefetcher& prefetcher) {
  Row<kVecs> rows[kRows];
  const StateT* from = s.from + row * state_dim;
  for (size_t r = 0; r < kRows; ++r) load_row(from + r * state_dim, width, rows[r]);
  constexpr int64_t kElement = sizeof(StateT);
  prefetcher.reading(from, kRows * state_dim * kElement);
  for (int64_t j = 0; j < s.tokens; ++j) {
    update_rows<kFamily, kVecs, kRows>(decays<kFamily>(m, head, j), head.b[j],
                                       head.v + j * m.height + row, m.k + j * m.width, width, rows);
    float* o = head.o + j * m.height + row;
    StateT* to = s.to + j * s.stride + row * state_dim;
    std::fill_n(o, kRows, 0.0f);
    add_lanes<kRows>(dots<kVecs, kRows>(rows, m.q + j * m.width, width), o);
    for (size_t r = 0; r < kRows; ++r)
      store_snapshot(rows[r], width, past_cache, to + r * state_dim);
  }
}

template <Family kFamily, size_t kVecs, class StateT>
void snapshot_state(const Snapshots<StateT>& s, const StepScratch& m, const HeadScratch& head,
                    const RecurrentShape& shape, Prefetcher& prefetcher) {
  constexpr int64_t kRegisters = kLanes >= 16 ? 16 : 8;
  constexpr int64_t kRows =
      kVecs > 0 ? std::clamp<int64_t>(2 * kRegisters / static_cast<int64_t>(kVecs), 1, kDotRows)
                : 1;
  const RowWidth<kVecs> width(shape.state_dim);
  const bool past_cache = streams<kVecs>(s.to) && s.stride % static_cast<int64_t>(kLanes) == 0;
  int64_t row = 0;
  for (; row + kRows <= shape.head_dim; row += kRows)
    snapshot_rows<kFamily, kVecs, kRows>(s, m, head, width, shape.state_dim, row, past_cache,
                                         prefetcher);
  for (; row < shape.head_dim; ++row)
    snapshot_rows<kFamily, kVecs, 1>(s, m, head, width, shape.state_dim, row, past_cache,
                                     prefetcher);
}

template <Family kFamily, class ActT>
class SnapshotBlock {
 public:
  SnapshotBlock(const SnapshotStepParams& params, const Block& block, float* memory,
                Prefetcher& prefetcher)
      : p_(params),
        block_(block),
        prefetcher_(prefetcher),
        m_(memory, params.shape, params.batch.ring),
        slot_(params.batch.slot[block.sequence]),
        first_(params.batch.query_start[block.sequence]),
        tokens_(params.batch.query_start[block.sequence + 1] - first_) {}

  void run() {
    if (slot_ < 0) return clear_outputs(p_, block_, first_, tokens_);
    for (int64_t i = 0; i < tokens_; ++i) gather_keys(i);
    for (int64_t head = block_.head_begin; head < block_.head_end; ++head) {
      const HeadScratch& scratch = m_.heads[head - block_.head_begin];
      for (int64_t i = 0; i < tokens_; ++i) gather_values(i, head, scratch);
      if constexpr (kFamily != Family::kKimiDelta) exponentials(tokens_, scratch.a);
      dispatch_float(p_.state.checkpoint_dtype, [&]<class StateT>() {
        const Snapshots<StateT> snapshots = snapshots_of<StateT>(head);
        dispatch_width(p_.shape.state_dim, [&]<size_t kVecs>() {
          snapshot_state<kFamily, kVecs>(snapshots, m_, scratch, p_.shape, prefetcher_);
        });
      });
      for (int64_t i = 0; i < tokens_; ++i)
        write_output<ActT>(p_, first_ + i, head, scratch.o + i * m_.height);
    }
  }

 private:
  template <class StateT>
  Snapshots<StateT> snapshots_of(int64_t head) const {
    const int64_t size = p_.shape.head_dim * p_.shape.state_dim, stride = p_.shape.heads * size;
    StateT* first = static_cast<StateT*>(p_.snapshots) + slot_ * p_.batch.ring.max_window * stride +
                    head * size;
    const int64_t source = p_.source[block_.sequence];
    const StateT* from = source >= 0 ? first + source * stride
                                     : static_cast<const StateT*>(p_.state.checkpoint) +
                                           slot_ * stride + head * size;
    return {from, first, stride, tokens_};
  }

  void gather_keys(int64_t i) {
    const int64_t size = p_.shape.state_dim, offset = block_.key_head * size;
    gather_key(is_delta(kFamily),
               static_cast<const ActT*>(p_.k) + (first_ + i) * p_.k_stride + offset, size, m_.width,
               m_.k + i * m_.width);
    gather_query(is_delta(kFamily),
                 static_cast<const ActT*>(p_.q) + (first_ + i) * p_.q_stride + offset, size,
                 m_.width, m_.q + i * m_.width);
  }

  void gather_values(int64_t i, int64_t head, const HeadScratch& scratch) {
    const int64_t token = first_ + i;
    scratch.b[i] = p_.b[token * p_.shape.heads + head];
    gather_value<kFamily>(
        static_cast<const ActT*>(p_.v) + token * p_.v_stride + head * p_.shape.head_dim,
        scratch.b[i], p_.shape.head_dim, m_.height, scratch.v + i * m_.height);
    if constexpr (kFamily == Family::kKimiDelta) {
      channel_decays(
          static_cast<const ActT*>(p_.gate) + token * p_.gate_stride + head * p_.shape.state_dim,
          p_.shape.state_dim, m_.width, p_.channel_gate, head, scratch.a + i * m_.width);
    } else {
      scratch.a[i] = p_.g[token * p_.shape.heads + head];
    }
  }

  const SnapshotStepParams& p_;
  const Block block_;
  Prefetcher& prefetcher_;
  StepScratch m_;
  int64_t slot_, first_, tokens_;
};

template <Family kFamily>
void run_snapshot_blocks(const SnapshotStepParams& params, const BlockList& blocks, int64_t begin,
                         int64_t end, float* memory) {
  Prefetcher prefetcher;
  dispatch_float(params.state.activation_dtype, [&]<class ActT>() {
    for (int64_t i = begin; i < end; ++i)
      SnapshotBlock<kFamily, ActT>(params, blocks[i], memory, prefetcher).run();
  });
}

// Blocks [begin, end) of the list.
void snapshot_blocks(const SnapshotStepParams& params, const BlockList& blocks, int64_t begin,
                     int64_t end, float* memory) {
  switch (params.shape.family) {
    case Family::kMamba2:
      run_snapshot_blocks<Family::kMamba2>(params, blocks, begin, end, memory);
      break;
    case Family::kGatedDelta:
      run_snapshot_blocks<Family::kGatedDelta>(params, blocks, begin, end, memory);
      break;
    case Family::kKimiDelta:
      run_snapshot_blocks<Family::kKimiDelta>(params, blocks, begin, end, memory);
      break;
  }
  hwy::FlushStream();  // other threads read what was stored past the caches
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm::cpu {

HWY_EXPORT(snapshot_blocks);

void snapshot_step(const SnapshotStepParams& params, void* workspace, ThreadPool& pool) {
  const auto& batch = params.batch;
  if (batch.sequences == 0) return;
  check_params(params);
  check_windows(batch, WindowUse::kDecode);
  debug_check(batch, WindowUse::kDecode);
  const int64_t scratch = StepScratch(nullptr, params.shape, params.batch.ring).floats;
  const BlockList blocks(batch.sequences, params.shape, pool.size());
  const auto kernel = HWY_DYNAMIC_DISPATCH(snapshot_blocks);
  pool.for_ranges(blocks.count(), [&](int64_t begin, int64_t end, int thread) {
    kernel(params, blocks, begin, end, static_cast<float*>(workspace) + thread * scratch);
  });
}

}  // namespace replayssm::cpu
#endif  // HWY_ONCE
