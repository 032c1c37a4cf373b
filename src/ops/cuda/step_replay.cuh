// The recurrence over rows of a state in registers: eight lanes a row, two rows a lane.
#pragma once

#include "ops/cuda/step_stream.cuh"

namespace replayssm::cuda {

// Checkpoint: the type in which states are kept; Read: that of their copies, void for none.
template <Family kFamily, class Act, class Checkpoint, class Read, int kState>
class RowReplay {
 public:
  static constexpr bool kHasCopy = !std::is_void_v<Read>;
  static constexpr int kPerLane = kState / kRowLanes, kGroups = 32 / kRowLanes;
  static constexpr int kRows = 2;  // of a lane
  using Shared = BlockShared<kFamily, Act, kState>;
  using States = float (&)[kRows][kPerLane];

  __device__ RowReplay(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                       const Shared& shared)
      : p_(p),
        launch_(launch),
        b_(b),
        shared_(shared),
        lane_(threadIdx.x % kRowLanes),
        group_(threadIdx.x % 32 / kRowLanes) {}

  // Eight rows, whose words are elements of S: runs the recurrence, stores what is due, adds to the
  // outputs. column: the block's, of the first row.
  template <class S>
  __device__ void run(const uint4* words, int head, int column) const {
    using Map = RowMap<S, kState>;
    float s[kRows][kPerLane];
    unpack<S>(words, column, s);
    int j = 0;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const int stop = part == 0 ? b_.stored : b_.replayed;
#pragma unroll 1
      for (; j < stop; ++j) {
        update<S>(head, j, column, s);
        if (b_.reads_after && j >= b_.history) read<Map>(head, j - b_.history, column, s);
      }
      if constexpr (std::is_same_v<S, Checkpoint>) {
        if (part == 0 && stop > 0) store<Map>(column, s);
      }
    }
    if (b_.reads_after) return;
#pragma unroll 1
    for (int i = 0; i < b_.window; ++i) read<Map>(head, i, column, s);
  }

 private:
  __device__ int row(int r) const { return r * kGroups + group_; }

  template <class S>
  __device__ void unpack(const uint4* words, int column, States s) const {
    constexpr int kRowWords = kPerLane * int(sizeof(S)) / 16, kElems = 4 / sizeof(S);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t* word = reinterpret_cast<const uint32_t*>(words + r * kRowWords);
#pragma unroll
      for (int i = 0; i < 4 * kRowWords; ++i) widen<S>(word[i], s[r] + i * kElems);
      if constexpr (kIs8Bit<S>) {
        const float scale = shared_.row_scales()[column + row(r)];
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] *= scale;
      }
    }
  }

  // One row of ring or window, in one order of operations for every route.
  template <class S>
  __device__ void update(int head, int j, int column, States s) const {
    using Map = RowMap<S, kState>;
    if constexpr (kFamily == Family::kKimiDelta) {
      float a[kPerLane];
      load_padded<Map>(shared_.channel_decays(head, j), lane_, a);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmul_rn(a[e], s[r][e]);
    } else {
      const float a = shared_.decays(head)[j];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmul_rn(a, s[r][e]);
    }
    float k[kPerLane], known[kRows] = {};
    Shared::template load_key<S>(shared_.key(j), lane_, k);
    float strength = shared_.strengths(head)[j];
    if constexpr (is_delta(kFamily)) {
      const float factor = shared_.key_factors()[j];
#pragma unroll
      for (int r = 0; r < kRows; ++r) known[r] = dot(s[r], k);
      row_sums(known, lane_);
#pragma unroll
      for (int r = 0; r < kRows; ++r) known[r] = __fmul_rn(factor, known[r]);
      strength = __fmul_rn(strength, factor);
    }
    const Act* values = shared_.value(j) + column;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float write = __fmul_rn(strength, __fsub_rn(to_float(values[row(r)]), known[r]));
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmaf_rn(write, k[e], s[r][e]);
    }
  }

  // Adds what token i reads to its outputs.
  template <class Map>
  __device__ void read(int head, int i, int column, States s) const {
    float t[kPerLane], o[kRows];
    load_padded<Map>(shared_.target(head, i), lane_, t);
#pragma unroll
    for (int r = 0; r < kRows; ++r) o[r] = dot(s[r], t);
    float sum = row_sum_pair(o, lane_);
    if constexpr (kFamily == Family::kMamba2) sum *= shared_.output_scale(head, i);
    if (lane_ % 4 == 0) shared_.outputs(i)[column + row(lane_ / 4)] += sum;
  }

  // Stores rows in the checkpoint and in its read copy.
  template <class Map>
  __device__ void store(int column, States s) const {
    const int64_t base =
        (static_cast<int64_t>(b_.target) * launch_.heads + b_.head) * launch_.head_dim + b_.row;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
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
    Read* copy = static_cast<Read*>(p_.state.read_copy.data) + row * kState;
    if constexpr (!kIs8Bit<Read>) {
      store_row<Map>(copy, x);
    } else {
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
      store_row<Map>(copy, scaled);
      if (lane_ == 0) p_.state.read_copy.scale[row] = scale;
    }
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Shared& shared_;
  const int lane_, group_;
};

}  // namespace replayssm::cuda
