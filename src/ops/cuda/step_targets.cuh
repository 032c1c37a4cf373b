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

  // The delta rule's walk back through the ancestors of a token, by a warp; without any, where the
  // output is read off the state behind it.
  __device__ void walk(int head, int i) const {
    constexpr bool kChannels = Context::kFamily == Family::kKimiDelta;
    const uint32_t path = c_.path(i);
    float t[kElems], newer = 1, mine = 0;  // a scalar decay of all newer rows is kept apart
    load_query(i, t);
    const float scale = 1.0f / (sqrtf(warp_sum(dot<2>(t, t)) + kL2NormEps) * sqrtf(kState));
#pragma unroll
    for (int e = 0; e < kElems; ++e) t[e] *= scale;
#pragma unroll 1
    for (int j = round_up(c_.b.rows, 16) - 1; j >= 0; --j) {
      float c = 0;
      if (c_.on_path(path, j)) {
        float k[kElems];
        load_elements<typename Context::Element, kElems>(c_.shared.key(j) + c_.lane() * kElems, k);
        const float factor = c_.shared.key_factors()[j];
        c = c_.shared.strengths(head)[j] * (factor * warp_sum(dot<2>(k, t)));
        const float step = -c * factor;
#pragma unroll
        for (int e = 0; e < kElems; ++e) t[e] = fmaf(step, k[e], t[e]);
        if constexpr (kChannels) {
          float a[kElems];
          const int column = padded_index(c_.lane() * kElems);
          load_elements<float, kElems>(c_.shared.channel_decays(head, j) + column, a);
#pragma unroll
          for (int e = 0; e < kElems; ++e) t[e] *= a[e];
        } else {
          c *= newer;
          newer *= c_.shared.decays(head)[j];
        }
      }
      if (c_.lane() == j % 32) mine = c;
      if (j % 32 == 0 && j + c_.lane() < round_up(c_.b.rows, 16))
        c_.store_weight(head, i, j + c_.lane(), mine);
    }
    if (c_.lane() == 0) c_.shared.output_scale(head, i) = newer;
    keep(head, i, t);
  }

 private:
  // This lane's elements, from kElems times its number on.
  __device__ void load_query(int i, float (&t)[kElems]) const {
    load_elements<typename Context::Element, kElems>(c_.shared.query(i) + c_.lane() * kElems, t);
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
