// The recurrence with its state in registers: a block owns rows of one head's state of one
// sequence, reads them once and updates them token by token. Snapshots store all of them after
// every token, past the caches, for nothing will read them soon; prompts store them behind the last
// token.
//
// Grid: (heads and slices of their rows, sequences). Eight lanes share a row (a warp one of more
// than 256 columns), and what is added in which order is as the conventional step has it: the
// states are the same to the bit. The block stages a chunk of tokens in shared memory while the
// state is on its way: keys as they came, queries as the recurrence uses them, Kimi Delta's decays,
// the rows' values and output gates.
#pragma once

#include "ops/cuda/token_chunk.cuh"

namespace replayssm::cuda {

// `State` is the type in which states are stored. kWhole: state_dim is kState and rows are
// aligned; else rows end at state_dim and are read element by element.
template <Family kFamily, class State, int kState, bool kWhole, class Tokens = WindowTokens>
class TokenRows : protected TokenChunk<kFamily, kState, kWhole, Tokens> {
 protected:
  using Chunk = TokenChunk<kFamily, kState, kWhole, Tokens>;

 public:
  using Chunk::kChannels, Chunk::kGroups, Chunk::kLanes, Chunk::Chunk;
  using Map = LaneMap<State, kState, kLanes>;
  static constexpr int kColumns = kState, kPerLane = kState / kLanes;
  static constexpr bool kFetches = kWhole;  // rows come through shared memory, these floats each
  static constexpr int kFetchedFloats = kWhole ? kState * int(sizeof(State)) / 4 : 0;
  static constexpr int kLaneRows = kState <= 64 ? 4 : kState <= 128 ? 2 : 1;
  static constexpr int kWarpRows = kGroups * kLaneRows;

  // Nobody may write `p`'s slots and query starts while this kernel overlaps the one before it,
  // nor, for snapshots, what it starts from.
  __device__ void run_snapshots(const SnapshotStepParams& p) {
    const int source = p.source[blockIdx.y];
    const int64_t state = state_elements();
    State* to = static_cast<State*>(p.snapshots) + slot_ * p.batch.ring.max_window * state +
                first_row() * launch_.state_dim;
    const State* from = source >= 0 ? to + source * state : checkpoint();
    if (kWhole && works()) fetch(from);
    wait_for_predecessor();
    run(from, [&](int i) { store<true>(to + i * state); });
  }

  // Checkpoint and read copy.
  __device__ void run_prompt() {
    wait_for_predecessor();
    State* const state = checkpoint();
    if (kWhole && works()) fetch(state);
    run(state, [&](int i) {
      if (i < window_ - 1) return;
      store<false>(state);
      store_copy();
    });
  }

 protected:
  using Chunk::block_row_, Chunk::group_, Chunk::head_, Chunk::lane_, Chunk::launch_,
      Chunk::layout_;
  using Chunk::lanes_sum, Chunk::output_index, Chunk::stage, Chunk::clear, Chunk::works;
  using Chunk::p_, Chunk::shared_, Chunk::slot_, Chunk::token_, Chunk::warp_, Chunk::window_;

  __device__ int64_t state_elements() const {
    return int64_t{launch_.heads} * launch_.head_dim * launch_.state_dim;
  }
  // The block's first, of all heads'.
  __device__ int64_t first_row() const { return int64_t{head_} * launch_.head_dim + block_row_; }
  __device__ State* checkpoint() const { return checkpoint(slot_); }
  __device__ State* checkpoint(int slot) const {
    return static_cast<State*>(p_.state.checkpoint) + slot * state_elements() +
           first_row() * launch_.state_dim;
  }

  // Takes the window's tokens; keep(i) is called behind each.
  template <class Keep>
  __device__ void run(const State* from, Keep&& keep) {
    if (slot_ < 0) clear();
    if (!works()) return;
    const bool at_once = window_ <= layout_.chunk;
    for (pass_ = 0; pass_ < layout_.passes; ++pass_) {
      for (int first = 0; first < window_; first += layout_.chunk) {
        const int count = min(layout_.chunk, window_ - first);
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
          keep(first + i);
        }
      }
    }
  }

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

  // The rows of the current pass. kPast: past the caches.
  template <bool kPast>
  __device__ void store(State* to) const {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r)
      if (has(r)) store_row<kPast>(to + int64_t{row(r)} * launch_.state_dim, s_[r]);
  }
  template <bool kPast, class T>
  __device__ void store_row(T* line, const float (&s)[kPerLane]) const {
#pragma unroll
    for (int c = 0; c < Map::kChunks; ++c) {
      const int column = Map::element(c, lane_);
      const float* x = s + c * Map::kElems;
      if constexpr (kWhole && kPast) {
        uint4 words;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          reinterpret_cast<uint32_t*>(&words)[i] = narrow<T>(x + i * 4 / sizeof(T));
        __stcs(reinterpret_cast<uint4*>(line + column), words);
      } else if constexpr (kWhole) {
        store_elements<T, Map::kElems>(line + column, x);
      } else {
#pragma unroll
        for (int e = 0; e < Map::kElems; ++e)
          if (column + e < launch_.state_dim) line[column + e] = element<T>(x[e]);
      }
    }
  }
  // One element, as `narrow` rounds it.
  template <class T>
  __device__ static T element(float x) {
    if constexpr (kIs8Bit<T>) {
      const float run[4] = {x};
      const uint32_t word = narrow<T>(run);
      return *reinterpret_cast<const T*>(&word);
    } else {
      return from_float<T>(x);
    }
  }

  // The same rows in the read copy.
  __device__ void store_copy() const { store_copy(slot_); }
  __device__ void store_copy(int slot) const {
    const ReadCopy& copy = p_.state.read_copy;
    if (copy.data == nullptr) return;
    const int64_t first = slot * int64_t{launch_.heads} * launch_.head_dim + first_row();
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      // The lanes of all rows reduce together.
      const int64_t at = first + row(r);
      float most = 0, scaled[kPerLane];
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) most = fmaxf(most, fabsf(s_[r][e]));
#pragma unroll
      for (int d = kLanes / 2; d > 0; d /= 2)
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, d));
      if (!has(r)) continue;
      if (copy.dtype == DType::kFloat16) store_row<false>(copy_row<Fp16>(at), s_[r]);
      if (copy.dtype == DType::kBFloat16) store_row<false>(copy_row<Bf16>(at), s_[r]);
      if (dtype_bytes(copy.dtype) > 1) continue;
      float scale = most / dtype_max_8bit(copy.dtype);
      if (scale < 0x1p-126f) scale = 0;
      const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) {
        const float q = s_[r][e] * inverse;  // a quotient is this and a correction
        scaled[e] = fmaf(fmaf(-q, scale, s_[r][e]), inverse, q);
      }
      if (copy.dtype == DType::kInt8) {
        store_row<false>(copy_row<Int8>(at), scaled);
      } else {
        store_row<false>(copy_row<Fp8>(at), scaled);
      }
      if (lane_ == 0) copy.scale[at] = scale;
    }
  }
  template <class T>
  __device__ T* copy_row(int64_t row) const {
    return static_cast<T*>(p_.state.read_copy.data) + row * launch_.state_dim;
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

  int pass_ = 0;
  float s_[kLaneRows][kPerLane];
};

}  // namespace replayssm::cuda
