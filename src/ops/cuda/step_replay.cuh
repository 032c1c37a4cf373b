// The recurrence over rows of a state in registers: eight lanes a row, two rows a lane and pass.
#pragma once

#include "ops/cuda/step_stream.cuh"

namespace replayssm::cuda {

// Checkpoint: the type in which states are kept; Read: that of their copies, void for none.
// kPasses: at once.
template <Family kFamily, class Act, class Checkpoint, class Read, int kState, int kPasses>
class RowReplay {
 public:
  static constexpr bool kHasCopy = !std::is_void_v<Read>;
  static constexpr bool kChannels = kFamily == Family::kKimiDelta;
  static constexpr int kPerLane = kState / kRowLanes, kGroups = 32 / kRowLanes;
  static constexpr int kRows = 2 * kPasses;  // of a lane
  // Where two passes share a row of ring or window, its values become floats first.
  static constexpr bool kStaged = kPasses == 2;
  using Shared = BlockShared<kFamily, Act, kState>;
  using States = float (&)[kRows][kPerLane];

  __device__ RowReplay(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                       const Shared& shared)
      : p_(p),
        launch_(launch),
        b_(b),
        shared_(shared),
        value_stride_(shared.value_stride()),
        lane_(threadIdx.x % kRowLanes),
        group_(threadIdx.x % 32 / kRowLanes) {}

  // Up to kPasses passes, whose words are elements of S: runs the recurrence, stores what is due,
  // adds to the outputs. column: the block's, of the first row.
  template <class S>
  __device__ void run(const uint4* words, int head, int column, int passes) const {
    using Map = RowMap<S, kState>;
    float s[kRows][kPerLane];
    recur<S>(words, head, column, passes, b_.replayed, s, [&](int j) {
      if (b_.reads_after && j >= b_.history) read<Map>(head, j - b_.history, column, passes, s);
    });
    if (b_.reads_after) return;
#pragma unroll 1
    for (int i = 0; i < b_.window; ++i) read<Map>(head, i, column, passes, s);
  }

  // The same without outputs: the first `stop` rows of ring and window. Calls then(j) behind each.
  template <class S, class Fn>
  __device__ void recur(const uint4* words, int head, int column, int passes, int stop, States s,
                        Fn&& then) const {
    unpack<S>(words, column, passes, s);
    if constexpr (kStaged) stage(head, column, stop);
    Row row = first_row<S>(head, column);
    int j = 0;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const int end = part == 0 ? b_.stored : stop;
#pragma unroll 1
      for (; j < end; ++j) {
        update<S>(row, s);
        then(j);
      }
      if constexpr (std::is_same_v<S, Checkpoint>) {
        if (part == 0 && (end > 0 || launch_.fold_all)) store<RowMap<S, kState>>(column, passes, s);
      }
    }
  }

 private:
  __device__ int row(int r) const { return r * kGroups + group_; }

  template <class S>
  __device__ void unpack(const uint4* words, int column, int passes, States s) const {
    constexpr int kRowWords = kPerLane * int(sizeof(S)) / 16, kElems = 4 / sizeof(S);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t* word = reinterpret_cast<const uint32_t*>(words + r * kRowWords);
#pragma unroll
      for (int i = 0; i < 4 * kRowWords; ++i) widen<S>(word[i], s[r] + i * kElems);
      if constexpr (kIs8Bit<S>) {
        const float scale = r < 2 * passes ? shared_.row_scales()[column + row(r)] : 0.0f;
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] *= scale;
      }
    }
  }

  // What the first `stop` rows write to these rows of the state: values, those of Mamba-2 times
  // their strengths. A lane's own lie together.
  __device__ void stage(int head, int column, int stop) const {
    constexpr int kRun = 8, kMost = 16 / sizeof(Act) < kRun ? 16 / sizeof(Act) : kRun;
    const int first = threadIdx.x % 2 * kRun;
    __syncwarp();
#pragma unroll 1
    for (int j = threadIdx.x % 32 / 2; j < stop; j += 16) {
      float x[kRun];
#pragma unroll
      for (int e = 0; e < kRun; e += kMost)
        load_elements<Act, kMost>(shared_.value(j) + column + first + e, x + e);
      if constexpr (!is_delta(kFamily)) {
        const float strength = shared_.strengths(head)[j];
#pragma unroll
        for (int e = 0; e < kRun; ++e) x[e] = __fmul_rn(strength, x[e]);
      }
      float* const to = staged() + j * (kRows * kGroups) + first / kGroups;
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        *reinterpret_cast<float2*>(to + g * kRows) = {x[g], x[g + kGroups]};
    }
    __syncwarp();
  }
  __device__ float* staged() const { return reinterpret_cast<float*>(shared_.fold_rows()); }

  // What the recurrence needs of a row of ring or window.
  struct Row {
    const Act* key;  // this lane's first element
    const std::conditional_t<kStaged, float, Act>* values;
    const float *strength, *decay, *factor;
  };
  template <class S>
  __device__ Row first_row(int head, int column) const {
    constexpr int kElems = RowMap<S, kState>::kElems;
    Row row{.key = shared_.key(0) + lane_ * kElems,
            .strength = shared_.strengths(head),
            .decay = kChannels ? shared_.channel_decays(head, 0) : shared_.decays(head),
            .factor = shared_.key_factors()};
    if constexpr (kStaged) {
      row.values = staged() + group_ * kRows;
    } else {
      row.values = shared_.value(0) + column + group_;
    }
    return row;
  }
  // This lane's, of all its rows.
  __device__ void load_values(Row& row, float (&v)[kRows]) const {
    if constexpr (kStaged) {
      load_elements<float, kRows>(row.values, v);
      row.values += kRows * kGroups;
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) v[r] = to_float(row.values[r * kGroups]);
      row.values += value_stride_;
    }
  }

  // Takes one row, in one order of operations for every route, and goes on to the next.
  template <class S>
  __device__ void update(Row& row, States s) const {
    using Map = RowMap<S, kState>;
    if constexpr (kChannels) {
      float a[kPerLane];
      load_padded<Map>(row.decay, lane_, a);
      row.decay += Shared::kPadded;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmul_rn(a[e], s[r][e]);
    } else {
      const float a = *row.decay++;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmul_rn(a, s[r][e]);
    }
    float k[kPerLane], write[kRows];
    Shared::template load_key<S>(row.key, 0, k);
    row.key += Shared::kKeyStride;
    load_values(row, write);
    if constexpr (is_delta(kFamily)) {
      float known[kRows];
      const float factor = *row.factor++;
#pragma unroll
      for (int r = 0; r < kRows; ++r) known[r] = dot(s[r], k);
      row_sums(known, lane_);
#pragma unroll
      for (int r = 0; r < kRows; ++r) known[r] = __fmul_rn(factor, known[r]);
      const float strength = __fmul_rn(*row.strength++, factor);
#pragma unroll
      for (int r = 0; r < kRows; ++r) write[r] = __fmul_rn(strength, __fsub_rn(write[r], known[r]));
    } else if constexpr (!kStaged) {
      const float strength = *row.strength++;
#pragma unroll
      for (int r = 0; r < kRows; ++r) write[r] = __fmul_rn(strength, write[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmaf_rn(write[r], k[e], s[r][e]);
  }

  // Adds what token i reads to its outputs.
  template <class Map>
  __device__ void read(int head, int i, int column, int passes, States s) const {
    float t[kPerLane], o[kRows];
    load_padded<Map>(shared_.target(head, i), lane_, t);
#pragma unroll
    for (int r = 0; r < kRows; ++r) o[r] = dot(s[r], t);
    float sum;
    constexpr int kLanes = kRowLanes / kRows;  // that have the same row's sum
    if constexpr (kRows == 2) sum = row_sum_pair(o, lane_);
    if constexpr (kRows == 4) sum = row_sum_quad(o, lane_);
    sum *= shared_.output_scale(head, i);
    const int r = lane_ / kLanes;
    if (lane_ % kLanes == 0 && r < 2 * passes) shared_.outputs(i)[column + row(r)] += sum;
  }

  // Stores rows in the checkpoint and in its read copy.
  template <class Map>
  __device__ void store(int column, int passes, States s) const {
    const int64_t base =
        (static_cast<int64_t>(b_.target) * launch_.heads + b_.head) * launch_.head_dim + b_.row;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= 2 * passes) break;
      const int64_t at = base + column + row(r);
      store_row<Map>(static_cast<Checkpoint*>(p_.state.checkpoint) + at * kState, s[r]);
      if constexpr (kHasCopy) store_copy<Map>(at, s[r]);
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
    static_assert(kIs8Bit<Read>);
    float most = 0;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) most = fmaxf(most, fabsf(x[e]));
    float scale = row_max(most) / dtype_max_8bit(device_dtype<Read>());
    if (scale < 0x1p-126f) scale = 0;
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    float scaled[kPerLane];
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) {
      const float q = x[e] * inverse;  // a quotient is this and a correction
      scaled[e] = fmaf(fmaf(-q, scale, x[e]), inverse, q);
    }
    store_row<Map>(static_cast<Read*>(p_.state.read_copy.data) + row * kState, scaled);
    if (lane_ == 0) p_.state.read_copy.scale[row] = scale;
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Shared& shared_;
  const int value_stride_, lane_, group_;
};

}  // namespace replayssm::cuda
