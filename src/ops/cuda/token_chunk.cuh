// What blocks that take token after token have in shared memory: a chunk of tokens at a time.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/channel_decay.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/rounded_math.cuh"
#include "ops/cuda/token_source.cuh"

namespace replayssm::cuda {

inline constexpr int kTokenWarps = 4;

// Where the kState elements of a row of T lie in kLanes lanes (RowMap, for any number of lanes).
template <class T, int kState, int kLanes>
struct LaneMap {
  static constexpr int kPerLane = kState / kLanes;
  static constexpr int kElems = 16 / sizeof(T), kChunks = kPerLane / kElems;
  static_assert(kChunks > 0);
  __device__ static int element(int chunk, int lane) { return (chunk * kLanes + lane) * kElems; }
};

// The block's place in the batch, and its chunk. kWhole: state_dim is kState and rows are aligned;
// else rows end at state_dim and are read element by element. Tokens: where they come from.
template <Family kFamily, int kState, bool kWhole, class Tokens>
class TokenChunk {
 public:
  static constexpr int kLanes = kState > 256 ? 32 : kRowLanes, kGroups = 32 / kLanes;
  using FloatMap = LaneMap<float, kState, kLanes>;
  static constexpr bool kChannels = kFamily == Family::kKimiDelta;
  // Runs of a key's four elements that a lane has in flight.
  static constexpr int kStagedAtOnce = kWhole ? FloatMap::kChunks : 1;

  __device__ TokenChunk(const RecurrentStepParams& p, const TokenLaunch& launch, float* shared)
      : p_(p),
        launch_(launch),
        layout_(launch.layout),
        shared_(shared),
        lane_(threadIdx.x % kLanes),
        group_(threadIdx.x % 32 / kLanes),
        warp_(threadIdx.x / 32),
        head_(launch.slices.divide(blockIdx.x)),
        block_row_((static_cast<int>(blockIdx.x) - head_ * int(launch.slices.divisor)) *
                   launch.layout.rows),
        slot_(p.batch.slot[blockIdx.y]),
        token_(first_token(p, launch)),
        window_(launch.folds_all ? 0 : p.batch.query_start[blockIdx.y + 1] - token_),
        tokens_(p, launch, slot_, token_, window_) {}

 protected:
  __device__ static int first_token(const RecurrentStepParams& p, const TokenLaunch& launch) {
    return launch.folds_all ? 0 : p.batch.query_start[blockIdx.y];
  }
  __device__ bool works() const { return slot_ >= 0 && window_ > 0; }
  __device__ int64_t output_index(int i) const {
    return (static_cast<int64_t>(token_ + i) * launch_.heads + head_) * launch_.head_dim +
           block_row_;
  }
  // The sum over a row's lanes, in each of them.
  __device__ static float lanes_sum(float x) {
#pragma unroll
    for (int d = kLanes / 2; d > kRowLanes / 2; d /= 2)
      x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, d));
    return row_sum(x);
  }

  __device__ void stage(int first, int count) const {
    stage_keys(first, count);
    stage_values(first, count);
    if constexpr (kChannels) stage_decays(first, count);
  }

  // The lanes of a row take a token.
  __device__ void stage_keys(int first, int count) const {
    const int key_head = launch_.group.divide(head_), warps = blockDim.x / 32;
#pragma unroll 1
    for (int base = warp_ * kGroups; base < count; base += warps * kGroups) {
      const int i = min(base + group_, count - 1);
      const int n = first + i;
      const Place k = tokens_.key(n, key_head), q = tokens_.query(n, key_head);
      const float strength = tokens_.strength(n, head_);
      const float log_decay = kChannels ? 0.0f : tokens_.log_decay(n, head_);
      float factor = 1, scale = 1;
      if constexpr (is_delta(kFamily)) {
        factor = inverse_norm(k);
        scale = inverse_norm(q) * launch_.query_scale;
      }
      if (base + group_ >= count) continue;
      copy_key(k, 1, shared_ + layout_.keys + i * layout_.width);
      copy_key(q, scale, shared_ + layout_.queries + i * layout_.width);
      if (lane_ != 0) continue;
      float* scalars = shared_ + layout_.scalars + 4 * i;
      scalars[0] = is_delta(kFamily) ? __fmul_rn(strength, factor) : strength;
      if constexpr (!kChannels) scalars[1] = expf(log_decay);
      scalars[2] = factor;
    }
  }
  // Four elements of a row of activations from `column` on; zeros behind its end.
  __device__ void load_four(const Place& row, int column, float (&x)[4]) const {
    if constexpr (kWhole) {
      load_run<4>(row.data, p_.state.activation_dtype, row.at + column, x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = 0;
        if (column + e < launch_.state_dim)
          load_run<1>(row.data, p_.state.activation_dtype, row.at + column + e, x + e);
      }
    }
  }
  __device__ float inverse_norm(const Place& row) const {
    float sum[4] = {};
#pragma unroll kStagedAtOnce
    for (int c = 0; c < FloatMap::kChunks; ++c) {
      float x[4];
      load_four(row, FloatMap::element(c, lane_), x);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] = __fmaf_rn(x[e], x[e], sum[e]);
    }
    const float lane_sum = __fadd_rn(__fadd_rn(sum[0], sum[2]), __fadd_rn(sum[1], sum[3]));
    return rounded_inverse(rounded_root(lanes_sum(lane_sum) + kL2NormEps));
  }
  __device__ void copy_key(const Place& row, float scale, float* to) const {
#pragma unroll kStagedAtOnce
    for (int c = 0; c < FloatMap::kChunks; ++c) {
      const int column = FloatMap::element(c, lane_);
      float x[4];
      load_four(row, column, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] *= scale;
      store_elements<float, 4>(to + padded_index(column), x);
    }
  }

  __device__ void stage_values(int first, int count) const {
    // The last threads have no key to stage.
#pragma unroll 1
    for (int n = blockDim.x - 1 - threadIdx.x; n < count * layout_.rows; n += blockDim.x) {
      const int i = n / layout_.rows, r = n - i * layout_.rows;
      const bool exists = block_row_ + r < launch_.head_dim;
      float v = 0, z = 0;
      if (exists) load_element(tokens_.value(first + i, head_), block_row_ + r, v);
      shared_[layout_.values + n] = v;
      if (!p_.z || !tokens_.is_new(first + i)) continue;
      if (exists) load_element(tokens_.output_gate(first + i, head_), block_row_ + r, z);
      shared_[layout_.gates + n] = silu(z);
    }
  }

  __device__ void load_element(const Place& row, int column, float& x) const {
    load_run<1>(row.data, p_.state.activation_dtype, row.at + column, &x);
  }

  __device__ void stage_decays(int first, int count) const {
    constexpr int kRuns = kState / 4;
    const float scale = p_.channel_gate.scale[head_];
    const float* bias = p_.channel_gate.bias + int64_t{head_} * launch_.state_dim;
#pragma unroll 1
    for (int n = threadIdx.x; n < count * kRuns; n += blockDim.x) {
      const int i = n / kRuns, column = n % kRuns * 4;
      float raw[4], a[4];
      load_four(tokens_.gate(first + i, head_), column, raw);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        a[e] = column + e < launch_.state_dim
                   ? channel_decay(raw[e], scale, bias[column + e], p_.channel_gate.lower_bound)
                   : 0.0f;
      store_elements<float, 4>(shared_ + layout_.decays + i * layout_.width + padded_index(column),
                               a);
    }
  }

  __device__ void clear() const {
    const int rows = min(layout_.rows, launch_.head_dim - block_row_);
    const float zero = 0;
    for (int i = 0; i < window_; ++i)
      for (int r = threadIdx.x; r < rows; r += blockDim.x)
        store_run<1>(p_.o, p_.o_dtype, output_index(i) + r, &zero);
  }

  const RecurrentStepParams& p_;
  const TokenLaunch& launch_;
  const TokenLayout& layout_;
  float* const shared_;
  const int lane_, group_, warp_, head_, block_row_, slot_, token_, window_;
  const Tokens tokens_;
};

}  // namespace replayssm::cuda
