// A step by the recurrence alone: a warp takes its rows of the states through the ring's rows while
// the kernel before still runs. What the window then asks for are two products a row and token.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/step_context.cuh"
#include "ops/cuda/step_replay.cuh"

namespace replayssm::cuda {

// A block of one head. States stay in shared memory, where their words came to, every lane's own.
template <class Context, class Checkpoint, class Read>
class StepAhead {
 public:
  using Act = typename Context::Element;
  using Shared = typename Context::Shared;
  static constexpr Family kFamily = Context::kFamily;
  static constexpr int kPerLane = Shared::kPerLane, kState = kPerLane * kRowLanes;

  __device__ StepAhead(const Context& context, const Passes& passes)
      : c_(context),
        passes_(passes),
        lane_(threadIdx.x % kRowLanes),
        group_(threadIdx.x % 32 / kRowLanes) {}

  // Starts to copy this warp's states. rows: the block's first.
  template <class S>
  __device__ void fetch(const char* rows) const {
    using G = Group<S, kState, Access::kRows>;
    for_passes([&](int pass, uint4* kept) {
      const char* const from = rows + pass * (kPassRows * G::kRowBytes) + G::lane_offset();
#pragma unroll
      for (int i = 0; i < G::kPassWords; ++i)
        copy_async_16(kept + i * 32, from + G::word_offset(i));
    });
  }

  // Takes them, elements of S, through the ring's rows; stores them where that is due.
  template <class S>
  __device__ void replay() const {
    const RowReplay<kFamily, Act, Checkpoint, Read, kState, 1> replay(c_.p, c_.launch, c_.b,
                                                                      c_.shared);
    for_passes([&](int pass, uint4* kept) {
      uint4 words[Group<S, kState, Access::kRows>::kPassWords];
#pragma unroll
      for (int i = 0; i < int(std::size(words)); ++i) words[i] = kept[i * 32];
      float s[2][kPerLane];
      replay.template recur<S>(words, 0, pass * kPassRows, 1, c_.b.history, s, [](int) {});
      move_states(kept, s, [](uint4& word, float* x) { store_elements<float, 4>(&word, x); });
    });
  }

  // What windows of several tokens need of each besides its rows, eight lanes a token. A barrier
  // must follow.
  __device__ void weigh_window() const {
#pragma unroll 1
    for (int first = c_.warp() * kGroups; first < c_.b.window; first += c_.warps() * kGroups) {
      const int i = min(first + group_, c_.b.window - 1), j = c_.b.history + i;
      float k[kPerLane], q[kPerLane];
      load_key<float>(c_.shared.key(j), k);
      load_key<float>(c_.shared.query(i), q);
      const Weights w = weigh(k, q);
      if (lane_ != 0) continue;
      if constexpr (kDelta) c_.shared.key_factors()[j] = w.key;
      c_.shared.output_scale(0, i) = w.query;
      c_.shared.part_scale(0, i) = w.product;
    }
  }

  // The window's outputs, to memory.
  template <class S>
  __device__ void read() const {
    const float skip = c_.skip(0);
    for_passes([&](int pass, uint4* kept) {
      float s[2][kPerLane];
      move_states(kept, s, [](uint4& word, float* x) { load_elements<float, 4>(&word, x); });
      const int row = pass * kPassRows + own_row() * kGroups + group_;
#pragma unroll 1
      for (int i = 0; i < c_.window(); ++i) take<S>(i, row, skip, s);
    });
  }

 private:
  using States = float (&)[2][kPerLane];

  static constexpr bool kDelta = is_delta(kFamily);
  static constexpr int kGroups = 32 / kRowLanes;
  // So many lanes have the sums of one of the two rows that eight lanes share; own_row says which.
  static constexpr int kOwnLanes = kDelta ? 2 : 4;
  __device__ int own_row() const { return lane_ / kOwnLanes % 2; }

  // What makes a key one of length 1, a query one of length K^-1/2; their product as they come.
  struct Weights {
    float key, query, product;
  };
  __device__ static Weights weigh(const float (&k)[kPerLane], const float (&q)[kPerLane]) {
    const float product = row_sum(dot<4>(k, q));
    if constexpr (!kDelta) return {1, 1, product};
    return {rsqrtf(row_sum(dot<4>(k, k)) + kL2NormEps),
            rsqrtf((row_sum(dot<4>(q, q)) + kL2NormEps) * kState), product};
  }
  __device__ Weights weights(int i) const {
    return {kDelta ? c_.shared.key_factors()[c_.b.history + i] : 1, c_.shared.output_scale(0, i),
            c_.shared.part_scale(0, i)};
  }

  // Calls fn(pass, kept) with this warp's passes and where this lane keeps words of each.
  template <class Fn>
  __device__ void for_passes(Fn&& fn) const {
    auto* kept = reinterpret_cast<uint4*>(c_.shared.stream()) + threadIdx.x % 32;
#pragma unroll 1
    for (int pass = passes_.begin; pass < passes_.end; ++pass, kept += 32 * kGroupWords)
      fn(pass, kept);
  }
  // Calls move(word, x) with four floats each.
  template <class Fn>
  __device__ static void move_states(uint4* kept, States s, Fn&& move) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int e = 0; e < kPerLane; e += 4) move(kept[(r * kPerLane + e) / 4 * 32], s[r] + e);
  }

  // Takes token i. `row` is this lane's own of the states.
  template <class S>
  __device__ void take(int i, int row, float skip, States s) const {
    const int j = c_.b.history + i;
    const float z = load_z(i, row);
    float k[kPerLane], q[kPerLane];
    load_key<S>(c_.shared.key(j), k);
    load_key<S>(c_.shared.query(i), q);
    decay<S>(j, s);
    const float strength = c_.shared.strengths(0)[j], v = to_float(c_.shared.value(j)[row]);
    float known = 0, seen;
    if constexpr (kDelta) {
      const float mine =
          row_sum_quad({dot(s[0], k), dot(s[1], k), dot(s[0], q), dot(s[1], q)}, lane_);
      const float other = __shfl_xor_sync(kAllLanes, mine, 4);
      known = lane_ < 4 ? mine : other;
      seen = lane_ < 4 ? other : mine;
    } else {
      seen = row_sum_pair({dot(s[0], q), dot(s[1], q)}, lane_);
    }
    const Weights w = Context::kManyTokens ? weights(i) : weigh(k, q);
    const float write = strength * w.key * (v - w.key * known);
    const float o = fmaf(w.query, fmaf(write, w.product, seen), skip * v);
    if (lane_ % kOwnLanes == 0 && lane_ / kOwnLanes < 2) store(i, row, o * z);
    if (i + 1 == c_.window()) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float mine = __shfl_sync(kAllLanes, write, r * kOwnLanes, kRowLanes);
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) s[r][e] = fmaf(mine, k[e], s[r][e]);
    }
  }

  template <class S>
  __device__ void load_key(const Act* row, float (&x)[kPerLane]) const {
    Shared::template load_key<S>(row, lane_, x);
  }
  // By the decays of row j.
  template <class S>
  __device__ void decay(int j, States s) const {
    float a[kPerLane];
    if constexpr (kFamily == Family::kKimiDelta) {
      load_padded<RowMap<S, kState>>(c_.shared.channel_decays(0, j), lane_, a);
    } else {
      const float all = expf(c_.shared.log_decays(0)[j]);
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) a[e] = all;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) s[r][e] *= a[e];
  }

  // What the output of token i is multiplied by.
  __device__ float load_z(int i, int row) const {
    if (!c_.p.z) return 1;
    const int64_t at = (c_.b.token + i) * c_.p.z_stride + output_column(row);
    return silu(to_float(static_cast<const Act*>(c_.p.z)[at]));
  }
  __device__ void store(int i, int row, float o) const {
    const int64_t width = c_.launch.heads * c_.launch.head_dim;
    store_run<1>(c_.p.o, c_.p.o_dtype, (c_.b.token + i) * width + output_column(row), &o);
  }
  __device__ int64_t output_column(int row) const {
    return c_.b.head * c_.launch.head_dim + c_.b.row + row;
  }

  const Context& c_;
  const Passes passes_;
  const int lane_, group_;
};

}  // namespace replayssm::cuda
