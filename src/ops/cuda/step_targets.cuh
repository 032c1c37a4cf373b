// Per head and token, the vector that meets the state: the query (Mamba-2), or the query walked back
// to the checkpoint.
#pragma once

#include "ops/cuda/step_context.cuh"
#include "ops/cuda/step_parts.cuh"

namespace replayssm::cuda {

// Read: the type of the states that meet the vectors, where the tensor cores take them; else void.
template <class Context, class Read>
class Targets {
 public:
  using Shared = typename Context::Shared;
  static constexpr int kState = Shared::kPerLane * kRowLanes;
  static constexpr int kElems = kState / 32;  // of a lane, where a warp has a vector
  static constexpr int kCount = std::is_void_v<Read>
                                    ? 0
                                    : target_parts(Context::kFamily, device_dtype<typename Context::Element>(),
                                                   device_dtype<Read>());

  __device__ explicit Targets(const Context& context) : c_(context) {}

  // Of token i, its parts as operands.
  __device__ const void* operands(int head, int i) const {
    if constexpr (kCount == 1) return c_.shared.query(i);
    return c_.shared.parts(head, i, kCount);
  }

  // Mamba-2's heads share the queries. A warp per query.
  __device__ void keep_queries() const {
#pragma unroll 1
    for (int i = c_.warp(); i < c_.b.window; i += c_.warps()) {
      float t[kElems];
      load_query(i, t);
      keep(0, i, t);
      if (!c_.b.reads_after) continue;
      for (int head = c_.lane(); head < c_.launch.config.heads; head += 32)
        c_.shared.output_scale(head, i) = 1;
    }
  }

  // The sums of keys and queries that Weights::solve asks for: 16 tokens by 32 columns a warp.
  __device__ void sum_keys() const {
    const int count = c_.launch.config.heads * c_.b.window;
#pragma unroll 1
    for (int first = 0; first < count; first += 16)
#pragma unroll 1
      for (int column = c_.warp() * 32; column < kState; column += c_.warps() * 32)
        sum_keys(first, count, column);
  }

  // The delta rule's walks back through the ancestors of tokens, eight lanes a walk; where the
  // output is read off the state behind a token there is nothing to walk.
  __device__ void walk_all() const {
    const int count = c_.launch.config.heads * c_.b.window, group = c_.lane() / kRowLanes;
#pragma unroll 1
    for (int first = c_.warp() * kWalks; first < count; first += c_.warps() * kWalks) {
      const int n = min(first + group, count - 1), head = n / c_.window();
      walk(head, n - head * c_.window(), first + group < count);
    }
  }

 private:
  static constexpr int kWalks = 32 / kRowLanes;
  using Element = typename Context::Element;
  using Map = RowMap<Element, kState>;
  static constexpr bool kChannels = Context::kFamily == Family::kKimiDelta;

  // keeps: this lane stores what it has.
  __device__ void walk(int head, int i, bool keeps) const {
    const int lane = threadIdx.x % kRowLanes;
    float t[Shared::kPerLane], newer = 1;  // a scalar decay of all newer rows is kept apart
    Shared::template load_key<Element>(c_.shared.query(i), lane, t);
    const float scale = 1.0f / (sqrtf(row_sum(dot<4>(t, t)) + kL2NormEps) * sqrtf(kState));
#pragma unroll
    for (int e = 0; e < Shared::kPerLane; ++e) t[e] *= scale;
    if (!c_.b.reads_after) {
      const uint32_t path = c_.path(i);
      for (int j = lane; j < round_up(c_.b.rows, 16); j += kRowLanes)
        if (keeps && (j < c_.b.replayed || j >= c_.b.rows)) c_.store_weight(head, i, j, 0);
#pragma unroll 1
      for (int j = c_.b.rows - 1; j >= c_.b.replayed; --j) {
        const float c = step_back(head, j, c_.on_path(path, j), t, newer);
        if (keeps && lane == 0) c_.store_weight(head, i, j, c);
      }
    }
    if (keeps && lane == 0) c_.shared.output_scale(head, i) = newer;
    keep_walked(head, i, keeps, t);
  }
  // Rows that are not on the path have no effect. Returns what the row adds to the output.
  __device__ float step_back(int head, int j, bool on, float (&t)[Shared::kPerLane],
                             float& newer) const {
    const int lane = threadIdx.x % kRowLanes;
    float k[Shared::kPerLane];
    Shared::template load_key<Element>(c_.shared.key(j), lane, k);
    const float factor = c_.shared.key_factors()[j],
                strength = on ? c_.shared.strengths(head)[j] : 0.0f;
    const float c = strength * (factor * row_sum(dot<4>(k, t))), step = -c * factor;
    if constexpr (kChannels) {
      float a[Shared::kPerLane];
      load_padded<Map>(c_.shared.channel_decays(head, j), lane, a);
#pragma unroll
      for (int e = 0; e < Shared::kPerLane; ++e)
        t[e] = (on ? a[e] : 1.0f) * fmaf(step, k[e], t[e]);
      return c;
    } else {
      const float weight = newer * c;
      if (on) newer *= c_.shared.decays(head)[j];
#pragma unroll
      for (int e = 0; e < Shared::kPerLane; ++e) t[e] = fmaf(step, k[e], t[e]);
      return weight;
    }
  }
  __device__ void keep_walked(int head, int i, bool keeps, float (&t)[Shared::kPerLane]) const {
    const int lane = threadIdx.x % kRowLanes;
    if constexpr (kCount > 0) {
      if (in_parts()) {
        float inverse = 1, scale = 1;
        if constexpr (std::is_same_v<PartOf<Read>, Fp16>) {
          float most = 0;
#pragma unroll
          for (int e = 0; e < Shared::kPerLane; ++e) most = fmaxf(most, fabsf(t[e]));
          scale = half_scale(row_max(most), inverse);
        }
        if (keeps && lane == 0) c_.shared.part_scale(head, i) = inverse;
#pragma unroll
        for (int e = 0; e < Shared::kPerLane; e += 2)
          if (keeps)
            store_parts<Read, kCount>(c_.shared.parts(head, i, kCount), Shared::kPartStride,
                                      Map::element(e / Map::kElems, lane) + e % Map::kElems,
                                      scale * t[e], scale * t[e + 1]);
        return;
      }
    }
    if (keeps) store_padded<Map>(c_.shared.target(head, i), lane, t);
  }

  // This lane's elements, from kElems times its number on.
  __device__ void load_query(int i, float (&t)[kElems]) const {
    load_elements<Element, kElems>(c_.shared.query(i) + c_.lane() * kElems, t);
  }
  // Whether the tensor cores read the states; else lanes do.
  __device__ bool in_parts() const { return !std::is_void_v<Read> && c_.b.replayed == 0; }

  __device__ void keep(int head, int i, float (&t)[kElems]) const {
    if constexpr (kCount == 1) {
      if (in_parts()) {  // the query is the operand
        if (c_.lane() == 0) c_.shared.part_scale(head, i) = 1;
        return;
      }
    } else if constexpr (kCount > 1) {
      if (in_parts()) return split(head, i, t);
    }
    store_elements<float, kElems>(
        c_.shared.target(head, i) + padded_index(c_.lane() * kElems), t);
  }
  __device__ void split(int head, int i, float (&t)[kElems]) const {
    float inverse = 1;
    if constexpr (std::is_same_v<PartOf<Read>, Fp16>) {
      float most = 0;
#pragma unroll
      for (int e = 0; e < kElems; ++e) most = fmaxf(most, fabsf(t[e]));
#pragma unroll
      for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, d));
      const float scale = half_scale(most, inverse);
#pragma unroll
      for (int e = 0; e < kElems; ++e) t[e] *= scale;
    }
    if (c_.lane() == 0) c_.shared.part_scale(head, i) = inverse;
#pragma unroll
    for (int e = 0; e < kElems; e += 2)
      store_parts<Read, kCount>(c_.shared.parts(head, i, kCount), Shared::kPartStride,
                                c_.lane() * kElems + e, t[e], t[e + 1]);
  }

  __device__ void sum_keys(int first, int count, int column) const {
    constexpr int kTiles = 4;  // of eight columns
    const int lane = c_.lane(), rows = c_.b.rows, stop = rows + c_.b.window;
    const int token = min(first + lane % 16, count - 1), head = token / c_.window();
    const Bf16* const factors =
        c_.shared.steps(0, head, token - head * c_.window()) + lane / 16 * 8;
    const int part_stride = c_.launch.layout.tokens * c_.launch.layout.step_stride;
    float sum[kTiles][4] = {};
#pragma unroll 1
    for (int k = c_.b.first_mixed() / 16 * 16; k < stop; k += 16) {
      const int row = k + lane % 16;
      const Bf16* from = row < rows ? c_.shared.key(row) : c_.shared.query(row - rows);
      from += column + lane / 16 * 8;
      uint32_t b[kTiles / 2][4];
#pragma unroll
      for (int n = 0; n < kTiles / 2; ++n)
        load_tiles_transposed(b[n], row < stop ? from + 16 * n : c_.shared.zeros());
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint32_t a[4];
        load_tiles(a, factors + part * part_stride + k);
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          mma<Bf16>(sum[n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = first + half * 8 + lane / 4;
      if (n >= count) break;
      const int to = n / c_.window(), i = n - to * c_.window();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        keep_pair(to, i, column + tile * 8 + lane % 4 * 2, sum[tile][2 * half],
                  sum[tile][2 * half + 1]);
      if (column == 0 && lane % 4 == 0) c_.shared.part_scale(to, i) = 1.0f / kPartScale;
    }
  }
  // Targets of the delta rule are no longer than K^-1/2 as long as strengths lie in [0, 2].
  static constexpr float kPartScale = kCount > 0 && std::is_same_v<PartOf<Read>, Fp16> ? 256.0f : 1.0f;

  __device__ void keep_pair(int head, int i, int column, float x, float y) const {
    if constexpr (kCount > 0) {
      if (in_parts())
        return store_parts<Read, kCount>(c_.shared.parts(head, i, kCount), Shared::kPartStride,
                                         column, kPartScale * x, kPartScale * y);
    }
    *reinterpret_cast<float2*>(c_.shared.target(head, i) + padded_index(column)) = {x, y};
  }

  const Context& c_;
};

}  // namespace replayssm::cuda
