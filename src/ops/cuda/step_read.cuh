// outputs += S t, for the rows of a warp, off states as they are stored.
#pragma once

#include "ops/cuda/step_fold.cuh"
#include "ops/cuda/step_replay.cuh"
#include "ops/cuda/step_targets.cuh"
#include "ops/cuda/step_tiles.cuh"

namespace replayssm::cuda {

// Source: the type of the states that are read. kFolds: they may be folded aside, of type
// Checkpoint then.
template <class Context, class Checkpoint, class Source, bool kFolds>
class StateReader {
 public:
  static constexpr bool kMany = Context::kManyTokens;
  static constexpr bool kTiles = !std::is_same_v<Source, float>;
  static constexpr int kState = Context::Shared::kPerLane * kRowLanes;
  using Target = Targets<Context, std::conditional_t<kTiles || kMany, Source, void>>;
  using G = Group<Source, kState, kTiles ? Access::kTiles : kMany ? Access::kQuads : Access::kRows>;

  __device__ StateReader(const Context& context, const Passes& passes)
      : c_(context), passes_(passes) {}

  __device__ void run(WarpStream& stream) const {
    if constexpr (kTiles) {
      read_tiles(stream);
    } else if constexpr (kMany) {
      read_quads(stream);
    } else {
      read_rows(stream);
    }
  }

 private:
  // What the products with a head's states are scaled by.
  __device__ float scale(int head, int i) const {
    return c_.shared.output_scale(head, i) * (kTiles ? c_.shared.part_scale(head, i) : 1.0f);
  }

  __device__ void read_rows(WarpStream& stream) const {
    static_assert(G::kPasses == 1);
    constexpr int kPerLane = kState / kRowLanes, kRows = 2;
    const int lane = threadIdx.x % kRowLanes;
    const int row = lane / 4 * 4 + threadIdx.x % 32 / kRowLanes;
    c_.for_heads(passes_, [&](int head, int pass, int stop) {
      float t[kPerLane];
      load_padded<RowMap<float, kState>>(c_.shared.target(head, 0), lane, t);
      const float factor = scale(head, 0);
#pragma unroll 1
      for (; pass < stop; ++pass) {
        uint4 words[kGroupWords];
        stream.template next<G>(words);
        float o[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float s[kPerLane];
#pragma unroll
          for (int i = 0; i < kPerLane; ++i)
            s[i] = reinterpret_cast<const float*>(words + r * (G::kPassWords / kRows))[i];
          o[r] = dot(s, t);
        }
        const float sum = factor * row_sum_pair(o, lane);
        if (lane % 4 == 0) c_.shared.outputs(0)[pass * kPassRows + row] += sum;
      }
    });
  }

  // Several tokens and fp32 states: two passes of eight rows at a time.
  __device__ void read_quads(WarpStream& stream) const {
    static_assert(G::kPasses == 1 && kGroupsInFlight == 2);
    const bool folds = kFolds && c_.b.aside > 0;
    c_.for_heads(passes_, [&](int head, int pass, int stop) {
#pragma unroll 1
      for (; pass < stop; pass += 2) {
        const int count = min(2, stop - pass);
        uint4 words[2][kGroupWords];
        stream.await();
        load_words(stream, count, words, [](int i) { return G::quad_offset(i); });
        if (!folds) stream.template refill<G>(count);
        multiply_quads(head, pass, count, words);
        if constexpr (kFolds) {
          if (!folds) continue;
          load_words(stream, count, words, [](int i) { return G::buffer_offset(i); });
          stream.template refill<G>(count);
          fold(head, pass, count, words);
        }
      }
    });
  }
  // Of the next groups.
  template <class Fn>
  __device__ static void load_words(const WarpStream& stream, int count,
                                    uint4 (&words)[2][kGroupWords], Fn&& offset) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (n == count) break;
      const char* const from = stream.buffer(n);
#pragma unroll
      for (int i = 0; i < kGroupWords; ++i)
        words[n][i] = *reinterpret_cast<const uint4*>(from + offset(i));
    }
  }
  __device__ void multiply_quads(int head, int pass, int count,
                                 const uint4 (&words)[2][kGroupWords]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < c_.b.window; first += 8) {
      const int i = first + lane / 4;
      const void* const target = Target(c_).operands(head, min(i, c_.b.window - 1));
      float o[2][2];
      multiply_halves<kState>(words, target, o);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        if (i < c_.b.window && n < count)
          add_pair(head, i, (pass + n) * kPassRows + lane % 4 * 2, o[n]);
    }
  }
  __device__ void fold(int head, int pass, int count, const uint4 (&words)[2][kGroupWords]) const {
    using Act = typename Context::Element;
    const RowReplay<Context::kFamily, Act, Checkpoint, void, kState, 2> replay(c_.p, c_.launch,
                                                                               c_.b, c_.shared);
    float s[decltype(replay)::kRows][decltype(replay)::kPerLane];
    replay.template recur<Source>(words[0], head, pass * kPassRows, count, c_.b.aside, s,
                                  [](int) {});
  }

  __device__ void add_pair(int head, int i, int at, const float (&o)[2]) const {
    float2& sum = *reinterpret_cast<float2*>(c_.shared.outputs(i) + at);
    const float factor = scale(head, i);
    sum = {fmaf(factor, o[0], sum.x), fmaf(factor, o[1], sum.y)};
  }

  __device__ void read_tiles(WarpStream& stream) const {
    using Tile = StateTile<Source, kState>;
    c_.for_heads(passes_, [&](int head, int pass, int stop) {
      [[maybe_unused]] TileVector<Source, kState, Target::kCount> vector;
      float factor = 0;
      if (!kMany && c_.b.window > 0) {
        vector.load(Target(c_).operands(head, 0));
        factor = scale(head, 0);
      }
#pragma unroll 1
      for (; pass < stop; pass += G::kPasses)
        stream.template next_tiles<G>([&](char* buffer) {
#pragma unroll
          for (int u = 0; u < G::kPasses; u += 2) {
            if (u > 0 && pass + u >= stop) break;
            char* const at = buffer + u / 2 * Tile::kBytes;
            const int column = (pass + u) * kPassRows;
            const int count = min(16, (stop - pass - u) * kPassRows);
            if constexpr (kMany) {
              read_tile(Tile(at), head, column, count);
            } else if (c_.b.window > 0) {
              read_tile(Tile(at), vector, factor, column, count);
            }
            if constexpr (kFolds) {
              if (c_.b.aside > 0) TileFold<Context, Checkpoint>(c_).run(at, head, column, count);
            }
          }
        });
    });
  }
  // One token's output.
  template <class Tile, class Vector>
  __device__ void read_tile(const Tile& tile, const Vector& vector, float factor, int column,
                            int count) const {
    const int lane = threadIdx.x % 32;
    float o[2];
    vector.multiply(tile, o);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (lane % 4 == 0 && 8 * half < count)
        add_output(0, column + 8 * half + lane / 4, factor * o[half]);
  }
  // Those of all tokens.
  template <class Tile>
  __device__ void read_tile(const Tile& tile, int head, int column, int count) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < c_.b.window; first += 8) {
      const TileVectors<Source, kState, Target::kCount> vectors(
          Target(c_).operands(head, min(first + lane % 8, c_.b.window - 1)));
      float o[4];
      vectors.multiply(tile, o);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = first + lane % 4 * 2 + e;
        if (i >= c_.b.window) break;
        const float factor = scale(head, i);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (8 * half < count)
            add_output(i, column + 8 * half + lane / 4, factor * o[2 * half + e]);
      }
    }
  }
  __device__ void add_output(int i, int at, float o) const {
    if (kIs8Bit<Source>) o *= c_.shared.row_scales()[at];
    c_.shared.outputs(i)[at] += o;
  }

  const Context& c_;
  const Passes passes_;
};

}  // namespace replayssm::cuda
