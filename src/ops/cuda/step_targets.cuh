// Per head and token, the vector that meets the state: the query (Mamba-2), or the query walked
// back to the checkpoint.
#pragma once

#include "ops/cuda/step_context.cuh"
#include "ops/cuda/step_parts.cuh"

namespace replayssm::cuda {

// Read: the type of the states that meet the vectors on the tensor cores; void: they do not.
template <class Context, class Read>
class Targets {
 public:
  using Shared = typename Context::Shared;
  static constexpr int kState = Shared::kPerLane * kRowLanes;
  static constexpr int kElems = kState / 32;  // of a lane, where a warp has a vector
  static constexpr bool kHalves = std::is_same_v<Read, float>;  // of fp32 numbers
  static constexpr int kCount =
      std::is_void_v<Read> || kHalves
          ? 0
          : target_parts(Context::kFamily, device_dtype<typename Context::Element>(),
                         device_dtype<Read>());
  static constexpr int kBytes = kHalves ? halves_stride(kState) : kCount * Shared::kPartStride * 2;

  __device__ explicit Targets(const Context& context) : c_(context) {}

  // Of token i, as operands.
  __device__ const void* operands(int head, int i) const { return parts(head, i); }

  // Mamba-2's heads share the queries. A warp per query, the last ones first: the others have
  // products to form.
  __device__ void keep_queries() const {
#pragma unroll 1
    for (int i = c_.warps() - 1 - c_.warp(); i < c_.b.window; i += c_.warps()) {
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

  // The delta rule's walks back through the ancestors of tokens, by a warp, some of its lanes each;
  // where an output is read off the state behind its token there is nothing to walk.
  static constexpr int kWalks = Context::kManyTokens ? 2 : 1;
  __device__ void walk(int head, int first) const {
    const int i = c_.together(first, c_.lane() / kTeam);
    float t[kShare], newer = 1;  // a scalar decay of all newer rows is kept apart
    load_query(i, t);
    const float scale = 1.0f / (sqrtf(team_sum(dot<2>(t, t)) + kL2NormEps) * sqrtf(kState));
#pragma unroll
    for (int e = 0; e < kShare; ++e) t[e] *= scale;
    if (!c_.b.reads_after) walk_back(head, i, t, newer);
    if (member() == 0) c_.shared.output_scale(head, i) = newer;
    keep(head, i, t);
  }

  // A target whose elements some lanes share, one behind the other.
  template <int kCountOf>
  __device__ void keep(int head, int i, float (&t)[kCountOf]) const {
    const int first = c_.lane() % (kState / kCountOf) * kCountOf;
    if constexpr (kHalves) {
      if (in_parts()) {
#pragma unroll
        for (int e = 0; e < kCountOf; e += 2)
          store_halves(parts(head, i), first + e, t[e], t[e + 1]);
        return;
      }
    } else if constexpr (kCount > 0) {
      if (in_parts()) return split(head, i, first, t);
    }
#pragma unroll
    for (int e = 0; e < kCountOf; e += 4)
      store_elements<float, 4>(c_.shared.target(head, i) + padded_index(first) + e, t + e);
  }

 private:
  using Element = typename Context::Element;

  static constexpr bool kChannels = Context::kFamily == Family::kKimiDelta;

  // Lanes of a walk, and elements of each.
  static constexpr int kTeam = 32 / kWalks, kShare = kState / kTeam;
  __device__ int member() const { return c_.lane() % kTeam; }
  __device__ static float team_sum(float x) { return warp_sum(x, kTeam); }

  // What a walk needs of a row: this lane's elements of its key and decays.
  struct Row {
    float k[kShare], a[kShare];
    float factor, strength, decay;
  };
  __device__ Row row(int head, int j) const {
    Row r;
    load_share<Element>(c_.shared.key(j) + member() * kShare, r.k);
    if constexpr (kChannels)
      load_share<float>(c_.shared.channel_decays(head, j) + padded_index(member() * kShare), r.a);
    r.factor = c_.shared.key_factors()[j];
    r.strength = c_.shared.strengths(head)[j] * r.factor;
    r.decay = kChannels ? 1.0f : c_.shared.decays(head)[j];
    return r;
  }
  // Walks over a row that has been multiplied with t; returns what it adds to the output.
  __device__ static float pass(const Row& row, bool on, float known, float (&t)[kShare],
                               float& newer) {
    const float c = on ? row.strength * known : 0.0f, step = -c * row.factor;
#pragma unroll
    for (int e = 0; e < kShare; ++e) {
      t[e] = fmaf(step, row.k[e], t[e]);
      if (kChannels && on) t[e] *= row.a[e];
    }
    const float before = newer;
    if (!kChannels && on) newer *= row.decay;
    return before * c;
  }
  template <int kSums>
  __device__ static void warp_sums(float (&x)[kSums]) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
#pragma unroll
      for (int u = 0; u < kSums; ++u) x[u] += __shfl_xor_sync(kAllLanes, x[u], d);
  }

  // Rows that are not on a path have no effect. Weights are stored a row for each lane at a time.
  __device__ void walk_back(int head, int i, float (&t)[kShare], float& newer) const {
    const uint32_t path = c_.path(i);
    float mine = 0;
    int j = c_.b.rows - 1;
    if constexpr (!Context::kManyTokens) {
#pragma unroll 1
      for (; j > c_.b.replayed; j -= 2) {
        float c[2];
        walk_pair(row(head, j), row(head, j - 1), t, newer, c);
        keep_weight(head, i, j, c[0], mine);
        keep_weight(head, i, j - 1, c[1], mine);
      }
    }
#pragma unroll 1
    for (; j >= c_.b.replayed; --j) {
      const Row r = row(head, j);
      const float known = team_sum(dot<2>(r.k, t));
      keep_weight(head, i, j, pass(r, c_.on_path(path, j), known, t, newer), mine);
    }
  }
  // Two rows at once, newer first: the second's product with t as the first leaves it follows from
  // products with t as it is.
  __device__ static void walk_pair(const Row& row, const Row& next, float (&t)[kShare],
                                   float& newer, float (&c)[2]) {
    float k[kShare];
#pragma unroll
    for (int e = 0; e < kShare; ++e) k[e] = kChannels ? next.k[e] * row.a[e] : next.k[e];
    float known[3] = {dot<2>(row.k, t), dot<2>(k, t), dot<2>(k, row.k)};
    warp_sums(known);
    const float step = -(row.strength * known[0]) * row.factor;
    c[0] = pass(row, true, known[0], t, newer);
    c[1] = pass(next, true, fmaf(step, known[2], known[1]), t, newer);
  }
  __device__ void keep_weight(int head, int i, int j, float c, float& mine) const {
    if (member() == j % kTeam) mine = c;
    if (j % kTeam != 0 && j != c_.b.replayed) return;
    const int row = j / kTeam * kTeam + member();
    if (row < round_up(c_.b.rows, 16)) c_.store_weight(head, i, row, mine, c_.skip(head));
    mine = 0;
  }

  // A lane's elements, some from `from` on.
  template <class T, int kCountOf>
  __device__ static void load_share(const T* from, float (&x)[kCountOf]) {
    constexpr int kMost = 16 / sizeof(T), kRun = kCountOf < kMost ? kCountOf : kMost;
#pragma unroll
    for (int e = 0; e < kCountOf; e += kRun) load_elements<T, kRun>(from + e, x + e);
  }
  // Those of a query that lanes share, one behind the other.
  template <int kCountOf>
  __device__ void load_query(int i, float (&t)[kCountOf]) const {
    load_share<Element>(c_.shared.query(i) + c_.lane() % (kState / kCountOf) * kCountOf, t);
  }
  // Whether the tensor cores read the states; else lanes do.
  __device__ bool in_parts() const { return !std::is_void_v<Read> && c_.b.replayed == 0; }

  __device__ void* parts(int head, int i) const { return c_.shared.parts(head, i, kBytes); }

  template <int kCountOf>
  __device__ void split(int head, int i, int first, float (&t)[kCountOf]) const {
    float inverse = 1;
    if constexpr (std::is_same_v<PartOf<Read>, Fp16>) {
      float most = 0;
#pragma unroll
      for (int e = 0; e < kCountOf; ++e) most = fmaxf(most, fabsf(t[e]));
      const float scale = half_scale(warp_max(most, kState / kCountOf), inverse);
#pragma unroll
      for (int e = 0; e < kCountOf; ++e) t[e] *= scale;
    }
    if (first == 0) c_.shared.part_scale(head, i) = inverse;
#pragma unroll
    for (int e = 0; e < kCountOf; e += 2)
      store_parts<Read, kCount>(parts(head, i), Shared::kPartStride, first + e, t[e], t[e + 1]);
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
          multiply_tile<Bf16>(sum[n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
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
  static constexpr float kPartScale =
      kCount > 0 && std::is_same_v<PartOf<Read>, Fp16> ? 256.0f : 1.0f;

  __device__ void keep_pair(int head, int i, int column, float x, float y) const {
    if constexpr (kHalves) {
      if (in_parts()) return store_halves(parts(head, i), column, x, y);
    } else if constexpr (kCount > 0) {
      if (in_parts())
        return store_parts<Read, kCount>(parts(head, i), Shared::kPartStride, column,
                                         kPartScale * x, kPartScale * y);
    }
    *reinterpret_cast<float2*>(c_.shared.target(head, i) + padded_index(column)) = {x, y};
  }

  const Context& c_;
};

}  // namespace replayssm::cuda
