// Speculative decoding by snapshots: a block owns rows of one head's state of one sequence, reads
// them once, updates them in registers token by token, and stores all of them after every token,
// past the caches, for nothing will read them soon.
//
// Grid: (heads and slices of their rows, sequences). Eight lanes share a row (a warp one of more
// than 256 columns), and what is added in which order is as the conventional step has it: the
// states are the same to the bit. The block stages a chunk of tokens in shared memory while the
// state is on its way: keys as they came, queries as the recurrence uses them, Kimi Delta's decays,
// the rows' values and output gates.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/async_copy.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/rounded_math.cuh"
#include "ops/cuda/snapshot_launch.h"

namespace replayssm::cuda {

inline constexpr int kSnapshotWarps = 4;

// Where the kState elements of a row of T lie in kLanes lanes (RowMap, for any number of lanes).
template <class T, int kState, int kLanes>
struct LaneMap {
  static constexpr int kPerLane = kState / kLanes;
  static constexpr int kElems = 16 / sizeof(T), kChunks = kPerLane / kElems;
  static_assert(kChunks > 0);
  __device__ static int element(int chunk, int lane) { return (chunk * kLanes + lane) * kElems; }
};

// `State` is the type of checkpoint and snapshots. kWhole: state_dim is kState and rows are
// aligned; else rows end at state_dim and are read element by element.
template <Family kFamily, class State, int kState, bool kWhole>
class SnapshotRows {
 public:
  static constexpr int kLanes = kState > 256 ? 32 : kRowLanes;
  using Map = LaneMap<State, kState, kLanes>;
  using FloatMap = LaneMap<float, kState, kLanes>;
  static constexpr int kPerLane = kState / kLanes, kGroups = 32 / kLanes;
  static constexpr int kLaneRows = kState <= 64 ? 4 : kState <= 128 ? 2 : 1;
  static constexpr int kWarpRows = kGroups * kLaneRows;
  static constexpr bool kChannels = kFamily == Family::kKimiDelta;
  // Runs of a key's four elements that a lane has in flight.
  static constexpr int kStagedAtOnce = kWhole ? FloatMap::kChunks : 1;

  __device__ SnapshotRows(const SnapshotStepParams& p, const SnapshotLaunch& launch, float* shared)
      : p_(p),
        launch_(launch),
        layout_(launch.layout),
        shared_(shared),
        lane_(threadIdx.x % kLanes),
        group_(threadIdx.x % 32 / kLanes),
        warp_(threadIdx.x / 32) {}

  __device__ void run() {
    const int sequence = blockIdx.y;
    head_ = launch_.slices.divide(blockIdx.x);
    block_row_ =
        (static_cast<int>(blockIdx.x) - head_ * int(launch_.slices.divisor)) * layout_.rows;
    const int slot = p_.batch.slot[sequence], source = p_.source[sequence];
    token_ = p_.batch.query_start[sequence];
    const int window = p_.batch.query_start[sequence + 1] - token_;
    const bool works = slot >= 0 && window > 0;
    const int64_t state = int64_t{launch_.heads} * launch_.head_dim * launch_.state_dim;
    const int64_t first_row = int64_t{head_} * launch_.head_dim + block_row_;
    State* to = static_cast<State*>(p_.snapshots) + slot * p_.batch.ring.max_window * state +
                first_row * launch_.state_dim;
    const State* from = source >= 0 ? to + source * state
                                    : static_cast<const State*>(p_.state.checkpoint) +
                                          slot * state + first_row * launch_.state_dim;
    if (kWhole && works) fetch(from);
    wait_for_predecessor();
    if (slot < 0) clear(window);
    if (!works) return;
    const bool at_once = window <= layout_.chunk;
    for (pass_ = 0; pass_ < layout_.passes; ++pass_) {
      for (int first = 0; first < window; first += layout_.chunk) {
        const int count = min(layout_.chunk, window - first);
        if (pass_ == 0 || !at_once) {
          if (pass_ > 0 || first > 0) __syncthreads();
          stage(first, count);
          __syncthreads();
        }
        if (first == 0) load(from);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
          update(i);
          output(first + i, i);
          store(to + (first + i) * state);
        }
      }
    }
  }

 private:
  // Row r of this lane in the current pass, within the block; whether the head has it.
  __device__ int row(int r) const {
    return (pass_ * int(blockDim.x / 32) + warp_) * kWarpRows + r * kGroups + group_;
  }
  __device__ bool has(int r) const { return block_row_ + row(r) < launch_.head_dim; }

  // This lane's words of row r of the current pass, in shared memory.
  __device__ uint4* words(int r) const {
    return reinterpret_cast<uint4*>(shared_) + (pass_ * kLaneRows + r) * Map::kChunks * blockDim.x +
           threadIdx.x;
  }
  // Starts copying the rows of all passes. Each lane copies what it will use itself.
  __device__ void fetch(const State* from) {
    for (pass_ = 0; pass_ < layout_.passes; ++pass_)
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        if (!has(r)) continue;
        const State* line = from + int64_t{row(r)} * kState;
#pragma unroll
        for (int c = 0; c < Map::kChunks; ++c)
          copy_async_16(words(r) + c * blockDim.x, line + Map::element(c, lane_));
      }
    copy_async_commit();
  }

  // The rows of the current pass.
  __device__ void load(const State* from) {
    if constexpr (kWhole) copy_async_wait_but<0>();
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const State* line = from + int64_t{row(r)} * launch_.state_dim;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) s_[r][e] = 0;
      if (!has(r)) continue;
#pragma unroll
      for (int c = 0; c < Map::kChunks; ++c) {
        const int column = Map::element(c, lane_);
        float* s = s_[r] + c * Map::kElems;
        if constexpr (kWhole) {
          constexpr int kWords = Map::kElems * int(sizeof(State)) / 4;
          static_assert(kWords == 4);
          const uint4 word = words(r)[c * blockDim.x];
#pragma unroll
          for (int i = 0; i < kWords; ++i)
            widen<State>(reinterpret_cast<const uint32_t*>(&word)[i], s + i * 4 / sizeof(State));
        } else {
#pragma unroll
          for (int e = 0; e < Map::kElems; ++e)
            if (column + e < launch_.state_dim) s[e] = to_float(line[column + e]);
        }
      }
    }
  }

  __device__ void store(State* to) const {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      if (!has(r)) continue;
      State* line = to + int64_t{row(r)} * launch_.state_dim;
#pragma unroll
      for (int c = 0; c < Map::kChunks; ++c) {
        const int column = Map::element(c, lane_);
        const float* s = s_[r] + c * Map::kElems;
        if constexpr (kWhole) {
          uint4 words;
#pragma unroll
          for (int i = 0; i < 4; ++i)
            reinterpret_cast<uint32_t*>(&words)[i] = narrow<State>(s + i * 4 / sizeof(State));
          __stcs(reinterpret_cast<uint4*>(line + column), words);
        } else {
#pragma unroll
          for (int e = 0; e < Map::kElems; ++e)
            if (column + e < launch_.state_dim) line[column + e] = from_float<State>(s[e]);
        }
      }
    }
  }

  // The recurrence: token i of the chunk, in the order of operations that every route has.
  __device__ void update(int i) {
    const float* key = shared_ + layout_.keys + i * layout_.width;
    const float* scalars = shared_ + layout_.scalars + 4 * i;
    if constexpr (kChannels) {
      for_columns(shared_ + layout_.decays + i * layout_.width, [&](int e, float a) {
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) s_[r][e] = __fmul_rn(a, s_[r][e]);
      });
    } else {
      const float a = scalars[1];
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r)
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s_[r][e] = __fmul_rn(a, s_[r][e]);
    }
    float write[kLaneRows] = {};
    if constexpr (is_delta(kFamily)) products(key, write);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const float v = shared_[layout_.values + i * layout_.rows + row(r)];
      const float known = is_delta(kFamily) ? __fmul_rn(scalars[2], write[r]) : 0.0f;
      write[r] = __fmul_rn(scalars[0], __fsub_rn(v, known));
    }
    for_columns(key, [&](int e, float k) {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) s_[r][e] = __fmaf_rn(write[r], k, s_[r][e]);
    });
  }

  // o = (S q + skip v) silu(z) of token i of the chunk; `index` counts from the window's first.
  __device__ void output(int index, int i) const {
    float o[kLaneRows];
    products(shared_ + layout_.queries + i * layout_.width, o);
    float mine = o[0];
#pragma unroll
    for (int r = 1; r < kLaneRows; ++r) mine = lane_ == r ? o[r] : mine;
    const int mine_row = row(lane_);
    if (lane_ >= kLaneRows || block_row_ + mine_row >= launch_.head_dim) return;
    const int at = i * layout_.rows + mine_row;
    if (p_.skip) mine = __fadd_rn(__fmul_rn(p_.skip[head_], shared_[layout_.values + at]), mine);
    if (p_.z) mine *= shared_[layout_.gates + at];
    store_run<1>(p_.o, p_.o_dtype, output_index(index) + mine_row, &mine);
  }
  __device__ int64_t output_index(int i) const {
    return (static_cast<int64_t>(token_ + i) * launch_.heads + head_) * launch_.head_dim +
           block_row_;
  }

  // Calls fn(e, x) with the element of a padded row that meets element e of this lane's rows.
  template <class Fn>
  __device__ void for_columns(const float* line, Fn&& fn) const {
#pragma unroll
    for (int c = 0; c < Map::kChunks; ++c)
#pragma unroll
      for (int e = 0; e < Map::kElems; e += 4) {
        float x[4];
        load_elements<float, 4>(line + padded_index(Map::element(c, lane_) + e), x);
#pragma unroll
        for (int u = 0; u < 4; ++u) fn(c * Map::kElems + e + u, x[u]);
      }
  }

  // The products of this lane's rows with a padded row, as `dot` and `row_sum` form them.
  __device__ void products(const float* line, float (&out)[kLaneRows]) const {
    float sum[kLaneRows][2];
    for_columns(line, [&](int e, float x) {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r)
        sum[r][e % 2] = e < 2 ? __fmul_rn(s_[r][e], x) : __fmaf_rn(s_[r][e], x, sum[r][e % 2]);
    });
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) out[r] = lanes_sum(__fadd_rn(sum[r][0], sum[r][1]));
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
      const int64_t token = token_ + first + i, column = int64_t{key_head} * launch_.state_dim;
      const int64_t k = token * p_.k_stride + column, q = token * p_.q_stride + column;
      const int64_t at = token * launch_.heads + head_;
      const float strength = p_.b[at], log_decay = kChannels ? 0.0f : p_.g[at];
      float factor = 1, scale = 1;
      if constexpr (is_delta(kFamily)) {
        factor = inverse_norm(p_.k, k);
        scale = inverse_norm(p_.q, q) * launch_.query_scale;
      }
      if (base + group_ >= count) continue;
      copy_key(p_.k, k, 1, shared_ + layout_.keys + i * layout_.width);
      copy_key(p_.q, q, scale, shared_ + layout_.queries + i * layout_.width);
      if (lane_ != 0) continue;
      float* scalars = shared_ + layout_.scalars + 4 * i;
      scalars[0] = is_delta(kFamily) ? __fmul_rn(strength, factor) : strength;
      if constexpr (!kChannels) scalars[1] = expf(log_decay);
      scalars[2] = factor;
    }
  }
  // Four elements of a row of activations at `index`, from `column` on; zeros behind its end.
  __device__ void load_four(const void* data, int64_t index, int column, float (&x)[4]) const {
    if constexpr (kWhole) {
      load_run<4>(data, p_.state.activation_dtype, index + column, x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = 0;
        if (column + e < launch_.state_dim)
          load_run<1>(data, p_.state.activation_dtype, index + column + e, x + e);
      }
    }
  }
  __device__ float inverse_norm(const void* data, int64_t index) const {
    float sum[4] = {};
#pragma unroll kStagedAtOnce
    for (int c = 0; c < FloatMap::kChunks; ++c) {
      float x[4];
      load_four(data, index, FloatMap::element(c, lane_), x);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] = __fmaf_rn(x[e], x[e], sum[e]);
    }
    const float lane_sum = __fadd_rn(__fadd_rn(sum[0], sum[2]), __fadd_rn(sum[1], sum[3]));
    return rounded_inverse(rounded_root(lanes_sum(lane_sum) + kL2NormEps));
  }
  __device__ void copy_key(const void* data, int64_t index, float scale, float* to) const {
#pragma unroll kStagedAtOnce
    for (int c = 0; c < FloatMap::kChunks; ++c) {
      const int column = FloatMap::element(c, lane_);
      float x[4];
      load_four(data, index, column, x);
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
      const int64_t token = token_ + first + i;
      const int64_t column = int64_t{head_} * launch_.head_dim + block_row_ + r;
      const bool exists = block_row_ + r < launch_.head_dim;
      float v = 0, z = 0;
      if (exists) load_run<1>(p_.v, p_.state.activation_dtype, token * p_.v_stride + column, &v);
      shared_[layout_.values + n] = v;
      if (!p_.z) continue;
      if (exists) load_run<1>(p_.z, p_.state.activation_dtype, token * p_.z_stride + column, &z);
      shared_[layout_.gates + n] = silu(z);
    }
  }

  __device__ void stage_decays(int first, int count) const {
    constexpr int kRuns = kState / 4;
    const float scale = p_.channel_gate.scale[head_];
    const float* bias = p_.channel_gate.bias + int64_t{head_} * launch_.state_dim;
#pragma unroll 1
    for (int n = threadIdx.x; n < count * kRuns; n += blockDim.x) {
      const int i = n / kRuns, column = n % kRuns * 4;
      const int64_t token = token_ + first + i;
      float raw[4], a[4];
      load_four(p_.gate, token * p_.gate_stride + int64_t{head_} * launch_.state_dim, column, raw);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        a[e] = column + e < launch_.state_dim ? decay(raw[e], scale, bias[column + e]) : 0.0f;
      store_elements<float, 4>(shared_ + layout_.decays + i * layout_.width + padded_index(column),
                               a);
    }
  }
  __device__ float decay(float raw, float scale, float bias) const {
    const float x = raw + bias, bound = p_.channel_gate.lower_bound;
    if (bound < 0) return expf(rounded_quotient(bound, fminf(1.0f + expf(scale * x), 0x1p100f)));
    return expf(scale * softplus(x));
  }

  __device__ void clear(int window) const {
    const int rows = min(layout_.rows, launch_.head_dim - block_row_);
    const float zero = 0;
    for (int i = 0; i < window; ++i)
      for (int r = threadIdx.x; r < rows; r += blockDim.x)
        store_run<1>(p_.o, p_.o_dtype, output_index(i) + r, &zero);
  }

  const SnapshotStepParams& p_;
  const SnapshotLaunch& launch_;
  const SnapshotLayout& layout_;
  float* const shared_;
  const int lane_, group_, warp_;
  int head_ = 0, block_row_ = 0, token_ = 0, pass_ = 0;
  float s_[kLaneRows][kPerLane];
};

template <Family kFamily, class State, int kState, bool kWhole>
__global__ void __launch_bounds__(32 * kSnapshotWarps, kState <= 128 ? 5 : 4)
    snapshot_step_kernel(const __grid_constant__ SnapshotStepParams p,
                         const __grid_constant__ SnapshotLaunch launch) {
  extern __shared__ __align__(16) float snapshot_shared[];
  release_successor();
  SnapshotRows<kFamily, State, kState, kWhole>(p, launch, snapshot_shared).run();
}

}  // namespace replayssm::cuda
