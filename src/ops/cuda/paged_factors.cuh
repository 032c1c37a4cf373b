// What a warp of the paged tile kernel forms before it reads the state, in its shared memory: the
// vectors that the state is multiplied with, decays, and the factors of all values.
#pragma once

#include "ops/cuda/mma.cuh"
#include "ops/cuda/paged_block.cuh"

namespace replayssm::cuda {

// c [16, 8] += a [16, 8] b [8, 8] with fp32 operands as sums of two numbers that a product takes,
// where they are wide; their two small parts are not multiplied.
__device__ inline float leading_part(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}
template <bool kWideA, bool kWideB>
__device__ inline void multiply_split(float (&c)[4], const float4& a, float b0, float b1) {
  const float4 high = kWideA ? make_float4(leading_part(a.x), leading_part(a.y), leading_part(a.z),
                                           leading_part(a.w))
                             : a;
  const float h0 = kWideB ? leading_part(b0) : b0, h1 = kWideB ? leading_part(b1) : b1;
  if constexpr (kWideB) multiply_halves_tile(c, high, b0 - h0, b1 - h1);
  if constexpr (kWideA)
    multiply_halves_tile(c, make_float4(a.x - high.x, a.y - high.y, a.z - high.z, a.w - high.w), h0,
                         h1);
  multiply_halves_tile(c, high, h0, h1);
}

template <replayssm_family kFamily, class Act, int kTiles>
class PagedFactors {
 public:
  static constexpr bool kDelta = kFamily != REPLAYSSM_MAMBA2;
  static constexpr int kKinds = kDelta ? 2 : 1;  // columns of a token
  static constexpr int kTokens = kTiles * paged_column_tokens(kDelta);
  static constexpr int kRun = 16 / int(sizeof(Act)), kBlock = 4 * kRun;

  __device__ PagedFactors(const PagedStep& p, const PagedTileLayout& layout, const PagedItem& b,
                          char* shared)
      : single(p.rule == REPLAYSSM_PAGED_SINGLE),
        p_(p),
        l_(layout),
        b_(b),
        shared_(shared),
        floats_(reinterpret_cast<float*>(shared)) {}

  __device__ void form() const {
    PagedGateInputs inputs;
    inputs.load(p_, b_, b_.head, threadIdx.x % 32);
    lay_out_vectors();
    if (keeps() && b_.owns_keys) cache_keys();
    form_gates(inputs);
    __syncwarp();
    form_factors();
    __syncwarp();
  }

  // What the state's products in this lane's two columns of every eight are multiplied with.
  __device__ void scales(float (&scale)[kTiles][2]) const {
    const float state = single || !b_.row.flushes ? decay() : 1.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) scale[n][e] = state * column_scale(8 * n + 2 * quad() + e);
  }

  // Whether the window is cached.
  __device__ bool keeps() const { return !single || !b_.row.flushes; }
  __device__ int place(int i) const { return b_.row.place(b_.row.history + i, p_.ring, !single); }
  // The first cached row that is not folded before the readout.
  __device__ int first_mixed() const { return !single && b_.row.flushes ? b_.row.history : 0; }
  // Rows that a fold takes: cached ones, then a single token of Mamba-2.
  __device__ int folded() const { return b_.row.history + (single && !kDelta ? 1 : 0); }
  __device__ float fold_weight(int j) const {
    if (j < b_.row.history) return weights()[j] * (single ? prefix(0) : 1.0f);
    return j < folded() ? within(0, 0) : 0.0f;
  }
  __device__ float fold_decay() const { return decay() * (single ? prefix(0) : 1.0f); }
  // The key of row j: cached ones, then those of the window; Gated Delta's to be scaled.
  __device__ const Act* key(int j) const {
    const int i = j - b_.row.history;
    if (i < 0)
      return at<Act>(p_.cache_k, b_.row.slot, b_.key_head, b_.row.place(j, p_.ring, !single));
    return kDelta ? vector(2 * i + 1) : given(p_.k, i);
  }
  // Column c of the matrix: queries; Gated Delta: the query and the key of every token in turn.
  __device__ Act* vector(int c) const {
    return reinterpret_cast<Act*>(shared_ + l_.vectors + c * l_.vector_bytes);
  }
  // What row j's values are multiplied with, by column; those of the row behind are stride() on.
  __device__ float* factors(int j) const { return floats_ + l_.factors + j * l_.factor_stride; }
  __device__ int stride() const { return l_.factor_stride; }
  // What d of the window's row i is multiplied with in token s: output, correction.
  __device__ float2& coefficients(int i, int s) const {
    return reinterpret_cast<float2*>(floats_ + l_.coefficients)[i * kTokens + s];
  }
  __device__ float& beta(int i) const { return floats_[l_.beta + i]; }
  __device__ float& key_scale(int i) const { return floats_[l_.key_scale + i]; }
  // Whether D is among the factors; whether anything follows the sums.
  __device__ bool mixes_skip() const { return p_.skip.data && p_.skip.stride[1] == 0; }
  __device__ bool finishes() const { return p_.z.data || (p_.skip.data && !mixes_skip()); }

  const bool single;

 private:
  __device__ static int quad() { return threadIdx.x % 4; }
  __device__ static int group() { return threadIdx.x % 32 / 4; }
  __device__ float* weights() const { return floats_ + l_.weights; }
  __device__ float& decay() const { return floats_[l_.decay]; }
  __device__ float& prefix(int s) const { return floats_[l_.prefix + s]; }
  __device__ float& query_scale(int s) const { return floats_[l_.query_scale + s]; }
  // Decay and weight of the window's row i in token s.
  __device__ float& within(int s, int i) const { return floats_[l_.within + s * kTokens + i]; }
  __device__ float column_scale(int c) const {
    const int s = c / kKinds;
    if constexpr (!kDelta) return prefix(s);
    return prefix(s) * (c % 2 == 0 ? query_scale(s) : key_scale(s));
  }
  __device__ const Act* given(const PagedValues& x, int i) const {
    return at<Act>(x, b_.row.token + i, b_.key_head);
  }

  // Eight lanes for a vector of the window.
  __device__ void lay_out_vectors() const {
    const int count = b_.row.window * kKinds;
#pragma unroll 1
    for (int first = 0; first < count; first += 4)
      lay_out_vector(min(first + int(threadIdx.x % 32 / kRowLanes), count - 1));
  }
  __device__ void lay_out_vector(int c) const {
    const int i = c / kKinds, lane = threadIdx.x % kRowLanes;
    const bool is_key = kDelta && c % 2 == 1;
    const Act* from = given(is_key ? p_.k : p_.q, i);
    float sum = 0;
#pragma unroll 4
    for (int e = lane * kRun; e < p_.state_dim; e += kRowLanes * kRun) {
      float x[kRun];
      load_elements<Act, kRun>(from + e, x);
      store_elements<Act, kRun>(vector(c) + e, x);
      if constexpr (kDelta) sum += dot(x, x);
    }
    if constexpr (kDelta) {
      const float norm = p_.normalise ? rsqrtf(row_sum(sum) + 1e-6f) : 1.0f;
      if (is_key && !single) scale_vector(from, norm, vector(c));
      if (lane == 0) {
        if (is_key) {
          key_scale(i) = single ? norm : 1.0f;
        } else {
          query_scale(i) = norm * p_.scale;
        }
      }
    }
  }
  // to = scale from, rounded.
  __device__ void scale_vector(const Act* from, float scale, Act* to) const {
#pragma unroll 1
    for (int e = threadIdx.x % kRowLanes * kRun; e < p_.state_dim; e += kRowLanes * kRun) {
      float x[kRun];
      load_elements<Act, kRun>(from + e, x);
#pragma unroll
      for (int n = 0; n < kRun; ++n) x[n] *= scale;
      store_elements<Act, kRun>(to + e, x);
    }
  }
  __device__ void cache_keys() const {
    __syncwarp();
    for (int i = threadIdx.x % 32 / kRowLanes; i < b_.row.window; i += 4)
      scale_vector(kDelta ? vector(2 * i + 1) : given(p_.k, i), kDelta ? key_scale(i) : 1.0f,
                   at<Act>(p_.cache_k, b_.row.slot, b_.key_head, place(i)));
  }

  // A lane for a token.
  __device__ void form_gates(const PagedGateInputs& inputs) const {
    const int lane = threadIdx.x % 32;
    const PagedHeadGates gates(p_, inputs);
    form_weights(p_, b_, gates, inputs.cached, weights(), &decay());
    PagedGate own{0, 0, 0};
    const bool live = lane < b_.row.window;
    if (live) {
      own = gates.fresh(inputs.dt.read(p_.dt), !single);
      if constexpr (kDelta) beta(lane) = inputs.strength(p_);
      if (b_.owns_gates && keeps())
        *at<float>(p_.cache_g, b_.row.slot, b_.head, place(lane)) = own.cached;
    }
    float since = 0, all = 0;  // log decays behind this lane's token; with it, from the first on
#pragma unroll 1
    for (int s = 0; s < b_.row.window; ++s) {
      const float next = __shfl_sync(kAllLanes, own.log_decay, s);
      if (s > lane) since += next;
      if (s <= lane) all += next;
      if (live && s >= lane) within(s, lane) = own.weight * expf(fminf(since, 0.0f));
    }
    if (live) prefix(lane) = expf(single ? all : fminf(all, 0.0f));
  }

  // Sixteen keys at a time: their products with all columns.
  __device__ void form_factors() const {
    const int rows = b_.row.history + b_.row.window;
#pragma unroll 1
    for (int first = first_mixed() / 16 * 16; first < rows; first += 16) {
      float sum[kTiles][4] = {};
      const int upper = first + group(), lower = upper + 8;
      const Act* keys[2] = {key(min(upper, rows - 1)), key(min(lower, rows - 1))};
#pragma unroll 4
      for (int at = quad() * kRun; at < p_.state_dim; at += kBlock) {
        float k[2][kRun];
#pragma unroll
        for (int r = 0; r < 2; ++r) load_elements<Act, kRun>(keys[r] + at, k[r]);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          float x[kRun];
          load_elements<Act, kRun>(vector(8 * n + group()) + at, x);
          constexpr bool kWide = sizeof(Act) == 4;
#pragma unroll
          for (int i = 0; i < kRun; i += 2)
            multiply_split<kWide, kWide>(
                sum[n], make_float4(k[0][i], k[1][i], k[0][i + 1], k[1][i + 1]), x[i], x[i + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        keep(upper, n, sum[n][0], sum[n][1]);
        keep(lower, n, sum[n][2], sum[n][3]);
      }
    }
  }
  // Row j's products with columns 8 n + 2 quad and the next.
  __device__ void keep(int j, int n, float x, float y) const {
    const int i = j - b_.row.history, column = 8 * n + 2 * quad();
    float2 factor = make_float2(0, 0);
    if constexpr (kDelta) {
      const int s = 4 * n + quad();
      if (i < 0 && j >= first_mixed()) {
        const float weight = weights()[j] * prefix(s);
        factor = make_float2(weight * query_scale(s) * x, weight * key_scale(s) * y);
      } else if (i >= 0 && i < b_.row.window) {
        const float weight = i <= s && s < b_.row.window ? within(s, i) * key_scale(i) : 0.0f;
        coefficients(i, s) = weight == 0.0f ? make_float2(0, 0)
                                            : make_float2(weight * query_scale(s) * x,
                                                          i < s ? weight * key_scale(s) * y : 0.0f);
      }
    } else {
      factor = make_float2(factor_of(j, column, x), factor_of(j, column + 1, y));
    }
    *reinterpret_cast<float2*>(factors(j) + column) = factor;
  }
  // Mamba-2's of row j in token s.
  __device__ float factor_of(int j, int s, float product) const {
    const int i = j - b_.row.history;
    if (s >= b_.row.window || i > s || j < first_mixed()) return 0.0f;
    if (i < 0) return weights()[j] * prefix(s) * product;
    const float factor = within(s, i) * product;
    return i == s && mixes_skip() ? factor + head_skip() : factor;
  }
  __device__ float head_skip() const { return value_at(p_.skip, b_.head * p_.skip.stride[0]); }

  const PagedStep& p_;
  const PagedTileLayout& l_;
  const PagedItem& b_;
  char* const shared_;
  float* const floats_;
};

}  // namespace replayssm::cuda
