// One decode step of the recurrence with windows of at most one token.
//
// Grid: (heads and slices as LaunchConfig says, sequences). Each warp owns consecutive rows of the
// states. Each of its lanes streams the words that it will use through its own ring in shared
// memory, kWords words of 16 bytes at a time and kDepth such groups ahead; the first leave as soon
// as the block knows its slot. Meanwhile the block copies ring and window rows to shared memory
// (the only barrier), and each warp forms for its head
//
//   t    the query walked back to the checkpoint (output_only), or the query itself
//   c_j  what row j of ring and window adds to the output, c_j v_j
//
// Then o = S t + sum_j c_j v_j. Where the step folds, the recurrence first runs over the rows of S
// in registers, and they are stored once.
#pragma once

#include "ops/cuda/step_head.cuh"
#include "ops/cuda/step_rows.cuh"

namespace replayssm::cuda {

// What the registers are shared among.
inline constexpr int kBlocksPerMultiprocessor = 4;

template <Family kFamily, class Act, class Checkpoint, class Read, int kState>
class WarpStep {
 public:
  static constexpr bool kHasCopy = !std::is_void_v<Read>;
  static constexpr int kPerLane = kState / kRowLanes;
  static constexpr int kGroups = 32 / kRowLanes, kLaneRows = kPassRows / kGroups;
  using Rows = BlockRows<kFamily, Act, kState>;
  using CopyT = std::conditional_t<kHasCopy, Read, Checkpoint>;
  template <bool kCopy>
  using Source = std::conditional_t<kCopy, CopyT, Checkpoint>;

  using Gates = typename WarpHead<kFamily, Act, kState>::Gates;

  // The block's passes [begin, end) are this warp's.
  __device__ WarpStep(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                      const Rows& rows, int begin, int end)
      : p_(p),
        launch_(launch),
        b_(b),
        rows_(rows),
        head_(p, launch, b, rows),
        states_(states(p, launch, b)),
        buffer_(rows.stream(threadIdx.x)),
        lane_(threadIdx.x % kRowLanes),
        group_(threadIdx.x % 32 / kRowLanes),
        head_passes_(launch.head_passes),
        begin_(begin),
        end_(end),
        first_head_(launch.passes.divide(begin)),
        fetched_(begin),
        fetch_stop_(min(end, (first_head_ + 1) * head_passes_)) {}

  __device__ static bool use_copy(const BlockPlace& b) { return kHasCopy && b.stored == 0; }

  __device__ Gates first_gates() const { return head_.gates(first_head_); }

  // Fetches the first groups of rows.
  __device__ void start() {
    for (int i = 0; i < kDepth; ++i) fetch();
  }
  // The rest, with the gates of the first head.
  __device__ void run(Gates gates) {
    if (use_copy(b_)) {
      if constexpr (kHasCopy) run_heads<true>(gates);
    } else {
      run_heads<false>(gates);
    }
  }

 private:
  template <bool kCopy>
  static constexpr bool kMma = !std::is_same_v<Source<kCopy>, float>;
  template <bool kCopy>
  static constexpr int kGroupPasses = Pass<Source<kCopy>, kState, false>::kPasses;

  // The block's first row.
  __device__ static const char* states(const RecurrentStepParams& p, const StepLaunch& launch,
                                       const BlockPlace& b) {
    const int64_t row =
        (static_cast<int64_t>(b.slot) * launch.heads + b.head) * launch.head_dim + b.row;
    if (use_copy(b))
      return static_cast<const char*>(p.state.read_copy.data) + row * kState * sizeof(CopyT);
    return static_cast<const char*>(p.state.checkpoint) + row * kState * sizeof(Checkpoint);
  }

  // Fetches the next group of passes; groups end where heads do.
  __device__ void fetch() {
    if (fetched_ < end_) {
      if (use_copy(b_)) {
        if constexpr (kHasCopy) fetch<true>();
      } else {
        fetch<false>();
      }
    }
    copy_async_commit();
  }
  template <bool kCopy>
  __device__ void fetch() {
    using S = Source<kCopy>;
    const S* from = reinterpret_cast<const S*>(states_) + fetched_ * kPassRows * kState;
    char* to = buffer_ + fetch_slot_ * kWords * 32 * 16;
    if (kMma<kCopy> && b_.replayed == 0) {
      Pass<S, kState, kMma<kCopy>>::fetch(from, fetch_stop_ - fetched_, to);
    } else {
      Pass<S, kState, false>::fetch(from, fetch_stop_ - fetched_, to);
    }
    fetched_ = min(fetched_ + kGroupPasses<kCopy>, fetch_stop_);
    if (fetched_ == fetch_stop_) fetch_stop_ = min(end_, fetch_stop_ + head_passes_);
    fetch_slot_ = fetch_slot_ + 1 == kDepth ? 0 : fetch_slot_ + 1;
  }

  template <bool kCopy>
  __device__ void run_heads(Gates gates) {
#pragma unroll 1
    for (int pass = begin_, head = first_head_; pass < end_; ++head) {
      const int stop = min(end_, (head + 1) * head_passes_);
      if (pass != begin_) gates = head_.gates(head);
      head_.prepare(head, gates, pass * kPassRows, stop * kPassRows,
                    b_.owns_gates && pass == head * head_passes_);
      if (b_.replayed > 0) {
        run_groups<kCopy>(pass, stop,
                          [&](const uint4* words, int at) { replay_pass<kCopy>(words, head, at); });
      } else if constexpr (kMma<kCopy>) {
        read_groups_mma<kCopy>(pass, stop);
      } else {
        read_groups<kCopy>(pass, stop);
      }
      pass = stop;
    }
  }

  template <bool kCopy>
  __device__ void read_groups(int pass, int stop) {
    float t[kPerLane];
    load_padded<RowMap<float, kState>>(head_.target(), lane_, t);
    run_groups<kCopy>(pass, stop, [&](const uint4* row_words, int at) {
      float o[kLaneRows];
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        float s[kPerLane];
        unpack<kCopy>(row_words, r, s);
        o[r] = dot(s, t);
      }
      add_output(at, o);
    });
  }

  template <bool kCopy>
  __device__ void read_groups_mma(int pass, int stop) {
    MmaTarget<Source<kCopy>, kState> target;
    target.load(head_.target(), head_.parts());
    run_groups<kCopy>(pass, stop, [&](const uint4* row_words, int at) {
      const int column = at * kPassRows + target.row();
      float o = target.multiply(row_words);
      if (threadIdx.x % 4 != 0) return;
      if constexpr (kCopy && kIs8Bit<CopyT>) o *= rows_.scales()[column];
      rows_.outputs()[column] += o;
    });
  }

  // Calls fn with the words of each pass of [pass, stop), and fetches as many groups ahead.
  template <bool kCopy, class Fn>
  __device__ void run_groups(int pass, int stop, Fn&& fn) {
    constexpr int kPasses = kGroupPasses<kCopy>;
#pragma unroll 1
    for (; pass < stop; pass += kPasses) {
      copy_async_wait_but<kDepth - 1>();
      uint4 words[kWords];
      const char* from = buffer_ + slot_ * kWords * 32 * 16;
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        words[i] = *reinterpret_cast<const uint4*>(from + i * 32 * 16);
      slot_ = slot_ + 1 == kDepth ? 0 : slot_ + 1;
      fetch();
#pragma unroll
      for (int u = 0; u < kPasses; ++u)
        if (pass + u < stop) fn(words + u * (kWords / kPasses), pass + u);
    }
  }

  __device__ int column(int pass, int r) const { return pass * kPassRows + r * kGroups + group_; }

  // Row r of this lane.
  template <bool kCopy>
  __device__ static void unpack(const uint4* words, int r, float (&s)[kPerLane]) {
    using S = Source<kCopy>;
    constexpr int kRowWords = kPerLane * int(sizeof(S)) / 16, kElems = 4 / sizeof(S);
    const uint32_t* word = reinterpret_cast<const uint32_t*>(words + r * kRowWords);
#pragma unroll
    for (int i = 0; i < 4 * kRowWords; ++i) widen<S>(word[i], s + i * kElems);
  }

  __device__ void add_output(int pass, const float (&o)[kLaneRows]) {
    const float sum = row_sum_pair(o, lane_);
    if (lane_ % 4 == 0) rows_.outputs()[column(pass, lane_ / 4)] += sum;
  }

  // Runs the recurrence over rows, stores them, outputs += S t.
  template <bool kCopy>
  __device__ void replay_pass(const uint4* words, int head, int pass) {
    using S = Source<kCopy>;
    using Map = RowMap<S, kState>;
    float s[kLaneRows][kPerLane];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      unpack<kCopy>(words, r, s[r]);
      if constexpr (kCopy && kIs8Bit<S>) {
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] *= rows_.scales()[column(pass, r)];
      }
    }
    int j = 0;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const int stop = part == 0 ? b_.stored : b_.replayed;
#pragma unroll 1
      for (; j < stop; ++j) update<Map>(head, j, pass, s);
      if constexpr (!kCopy) {
        if (part == 0 && stop > 0) store(pass, s);
      }
    }
    if (b_.window == 0) return;
    float t[kPerLane], o[kLaneRows];
    load_padded<Map>(head_.target(), lane_, t);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) o[r] = dot(s[r], t);
    add_output(pass, o);
  }

  // The recurrence: one row of ring or window, in one order of operations for every route.
  template <class Map>
  __device__ void update(int head, int j, int pass, float (&s)[kLaneRows][kPerLane]) {
    if constexpr (kFamily == Family::kKimiDelta) {
      float a[kPerLane];
      rows_.template decays<Map>(head, j, lane_, a);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r)
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmul_rn(a[e], s[r][e]);
    } else {
      const float a = head_.decay(j);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r)
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmul_rn(a, s[r][e]);
    }
    float k[kPerLane], known[kLaneRows] = {};
    rows_.template key<Map>(j, lane_, k);
    float strength = head_.strength(j);
    if constexpr (is_delta(kFamily)) {
      const float factor = head_.factor(j);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) known[r] = dot(s[r], k);
      row_sums(known, lane_);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) known[r] = __fmul_rn(factor, known[r]);
      strength = __fmul_rn(strength, factor);
    }
    const Act* values = rows_.values(j);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const float v = to_float(values[column(pass, r)]);
      const float write = __fmul_rn(strength, __fsub_rn(v, known[r]));
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmaf_rn(write, k[e], s[r][e]);
    }
  }

  // Stores rows in the checkpoint and in its read copy.
  __device__ void store(int pass, const float (&s)[kLaneRows][kPerLane]) {
    using Map = RowMap<Checkpoint, kState>;
    const int64_t base =
        (static_cast<int64_t>(b_.target) * launch_.heads + b_.head) * launch_.head_dim + b_.row;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const int64_t row = base + column(pass, r);
      store_row<Map>(static_cast<Checkpoint*>(p_.state.checkpoint) + row * kState, s[r]);
      if constexpr (kHasCopy) store_copy<Map>(row, s[r]);
    }
  }

  template <class Map, class T>
  __device__ void store_row(T* row, const float (&x)[kPerLane]) const {
#pragma unroll
    for (int c = 0; c < Map::kChunks; ++c)
      store_elements<T, Map::kElems>(row + Map::element(c, lane_), x + c * Map::kElems);
  }

  template <class Map>
  __device__ void store_copy(int64_t row, const float (&x)[kPerLane]) const {
    CopyT* copy = static_cast<CopyT*>(p_.state.read_copy.data) + row * kState;
    if constexpr (!kIs8Bit<CopyT>) {
      store_row<Map>(copy, x);
    } else {
      float most = 0;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) most = fmaxf(most, fabsf(x[e]));
      const float scale = row_max(most) / dtype_max_8bit(device_dtype<CopyT>());
      float scaled[kPerLane];
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) scaled[e] = scale > 0 ? x[e] / scale : 0.0f;
      store_row<Map>(copy, scaled);
      if (lane_ == 0) p_.state.read_copy.scale[row] = scale;
    }
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Rows& rows_;
  WarpHead<kFamily, Act, kState> head_;
  const char* const states_;
  char* const buffer_;  // this lane's ring
  const int lane_, group_, head_passes_, begin_, end_;
  const int first_head_;
  int fetched_, fetch_stop_;  // passes before this one are here or on their way; its head's end
  int fetch_slot_ = 0, slot_ = 0;
};

template <Family kFamily, class Act, class Checkpoint, class Read, int kState>
__global__ void __launch_bounds__(32 * kMaxWarps, kBlocksPerMultiprocessor)
    recurrent_step_kernel(const __grid_constant__ RecurrentStepParams p,
                          const __grid_constant__ StepLaunch launch) {
  using Step = WarpStep<kFamily, Act, Checkpoint, Read, kState>;
  extern __shared__ __align__(128) char shared[];
  const auto& layout = launch.layout;
  const int warp = threadIdx.x / 32, passes = layout.columns / kPassRows;
  // The number of warps is a power of two.
  const int shift = 31 - __clz(launch.config.warps);
  const int begin = (warp * passes) >> shift, end = ((warp + 1) * passes) >> shift;

  wait_for_predecessor();
  const BlockPlace b = block_place(p, launch);
  if (b.slot < 0) {
    for (int i = 0; i < b.window; ++i)
      store_outputs<Act>(p, launch, b, b.token + i, nullptr, begin * kPassRows, end * kPassRows);
    return;
  }
  if (b.rows == 0 || (b.window == 0 && !launch.fold_all)) return;

  const BlockRows<kFamily, Act, kState> rows(p, launch, b, shared);
  Step step(p, launch, b, rows, begin, end);
  step.start();
  rows.fetch();
  const auto gates = step.first_gates();
  if (Step::use_copy(b) && kIs8Bit<typename Step::CopyT>) {
    const int64_t row =
        (static_cast<int64_t>(b.slot) * launch.heads + b.head) * launch.head_dim + b.row;
    for (int i = threadIdx.x * 4; i < layout.columns; i += blockDim.x * 4)
      copy_async_16(rows.scales() + i, p.state.read_copy.scale + row + i);
  }
  copy_async_wait();
  __syncthreads();
  step.run(gates);
  __syncwarp();
  if (b.window > 0)
    store_outputs<Act>(p, launch, b, b.token, rows.outputs(), begin * kPassRows, end * kPassRows);
}

}  // namespace replayssm::cuda
