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

  // What the recurrence needs of a row of ring or window.
  struct Row {
    const Act *key, *values;  // this lane's first elements
    const float *strength, *decay, *factor;
  };
  template <class S>
  __device__ Row first_row(int head, int column) const {
    constexpr int kElems = RowMap<S, kState>::kElems;
    return {shared_.key(0) + lane_ * kElems, shared_.value(0) + column + group_,
            shared_.strengths(head),
            kChannels ? shared_.channel_decays(head, 0) : shared_.decays(head),
            shared_.key_factors()};
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
    float k[kPerLane], known[kRows] = {};
    Shared::template load_key<S>(row.key, 0, k);
    row.key += Shared::kKeyStride;
    float strength = *row.strength++;
    if constexpr (is_delta(kFamily)) {
      const float factor = *row.factor++;
#pragma unroll
      for (int r = 0; r < kRows; ++r) known[r] = dot(s[r], k);
      row_sums(known, lane_);
#pragma unroll
      for (int r = 0; r < kRows; ++r) known[r] = __fmul_rn(factor, known[r]);
      strength = __fmul_rn(strength, factor);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float v = to_float(row.values[r * kGroups]);
      const float write = __fmul_rn(strength, __fsub_rn(v, known[r]));
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmaf_rn(write, k[e], s[r][e]);
    }
    row.values += value_stride_;
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
