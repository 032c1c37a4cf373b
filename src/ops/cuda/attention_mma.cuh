// Attention on the tensor cores, for 16-bit caches.
//
// A block takes a tile of queries of one sequence and one head of keys, kRows of them, and goes
// through its keys kKeys at a time: one such step is in flight while the one before is used. Warps
// come in row tiles of 16 queries; the warps of a row tile share its keys while scores are formed
// and its columns while values are summed. Weights of a step pass through shared memory, rounded to
// the cache's type. Barriers per step: keys are here; row maxima are here; weights are here.
#pragma once

#include "ops/cuda/attention_parts.cuh"
#include "ops/cuda/mma.cuh"

namespace replayssm::cuda {

template <int kDim, int kRowTiles, bool kShared>
struct AttentionTile {
  static constexpr int kRows = 16 * kRowTiles, kWarps = kRowTiles == 1 ? 4 : 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTeams = kWarps / kRowTiles;  // warps of a row tile
  static constexpr int kKeys = kDim <= 128 ? 64 : 32;
  static constexpr int kStride = kDim + 8;  // rows of eight lanes meet no bank twice
  static constexpr int kWeightStride = kKeys + 8;
  static constexpr int kKeyTiles = kKeys / kTeams / 8;  // of a warp, eight keys each
  static constexpr int kColumnTiles = (kDim / 8 + kTeams - 1) / kTeams;  // of a warp, at most
  static constexpr int kSides = kShared ? 1 : 2;

  // Shared memory, in 16-bit elements up to `row_at`.
  static constexpr int kQueries = 0, kStages = kQueries + kRows * kStride, kSide = kKeys * kStride,
                       kStage = kSides * kSide, kWeights = kStages + 2 * kStage,
                       kEnd = kWeights + kRows * kWeightStride;
  static constexpr int kReduceBytes = kTeams * kRows * 4, kRowBytes = 2 * kKeys * 8;
  static constexpr int kBytes = kEnd * 2 + kReduceBytes + kRowBytes;
  static constexpr int kFit = (227 << 10) / (kBytes + 1024);  // blocks of a multiprocessor
  static constexpr int kBlocks = kWarps > 4 ? 1 : kFit < 3 ? kFit : 3;
};

template <class T, int kDim, int kRowTiles, bool kShared>
struct AttentionBlock {
  using Tile = AttentionTile<kDim, kRowTiles, kShared>;
  static constexpr int kKeyTiles = Tile::kKeyTiles, kColumnTiles = Tile::kColumnTiles;

  const AttentionCall& call;
  AttentionWork work;
  T* shared;
  float* reduce;    // [teams, rows]
  int64_t* row_at;  // [2, keys] where keys of a step lie in the cache; -1: not to be read
  int lane, row_tile, team;
  float out[kColumnTiles][4];
  float most[2], sum[2];  // of rows lane / 4 and 8 more; sum: this lane's share
  int last_key[2];

  __device__ AttentionBlock(const AttentionCall& call, T* memory)
      : call(call),
        shared(memory),
        reduce(reinterpret_cast<float*>(memory + Tile::kEnd)),
        row_at(reinterpret_cast<int64_t*>(reduce + Tile::kTeams * Tile::kRows)),
        lane(static_cast<int>(threadIdx.x) % 32),
        row_tile(static_cast<int>(threadIdx.x) / 32 % kRowTiles),
        team(static_cast<int>(threadIdx.x) / 32 / kRowTiles) {}

  __device__ int row(int half) const { return row_tile * 16 + lane / 4 + 8 * half; }
  __device__ T* stage(int step, int side) const {
    return shared + Tile::kStages + (step & 1) * Tile::kStage + (kShared ? 0 : side * Tile::kSide);
  }

  __device__ void locate(int step) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= Tile::kKeys) return;
    const int key = work.key_begin + step * Tile::kKeys + i;
    row_at[(step & 1) * Tile::kKeys + i] = key < work.key_end ? cache_row(call, work, key) : -1;
  }

  __device__ void fetch_queries() {
    for (int i = static_cast<int>(threadIdx.x); i < Tile::kRows * kDim / 8; i += Tile::kThreads) {
      const int r = i / (kDim / 8), column = i % (kDim / 8) * 8;
      const bool exists = r < work.rows;
      const T* from = static_cast<const T*>(call.p.q.data) +
                      work.offset(call, exists ? r : 0, call.p.q.stride, kDim) + column;
      copy_async_16_or_zero(shared + r * Tile::kStride + column, from, exists);
    }
  }

  // Keys behind the range become zeros: what lies there may be NaN.
  __device__ void fetch(int step) {
#pragma unroll
    for (int side = 0; side < Tile::kSides; ++side) {
      const T* cache = static_cast<const T*>(side == 0 ? call.p.cache.k : call.p.cache.v);
      T* to = stage(step, side);
#pragma unroll 4
      for (int i = static_cast<int>(threadIdx.x); i < Tile::kKeys * kDim / 8; i += Tile::kThreads) {
        const int r = i / (kDim / 8), column = i % (kDim / 8) * 8;
        const int64_t at = row_at[(step & 1) * Tile::kKeys + r];
        copy_async_16_or_zero(to + r * Tile::kStride + column, cache + (at < 0 ? 0 : at) + column,
                              at >= 0);
      }
    }
  }

  // This warp's [16, 8 kKeyTiles] products of queries and keys.
  __device__ void multiply_keys(int step, float (&score)[kKeyTiles][4]) {
    const T* queries = shared + (row_tile * 16 + lane % 16) * Tile::kStride + lane / 16 * 8;
    const T* keys =
        stage(step, 0) + (team * kKeyTiles * 8 + lane % 8) * Tile::kStride + lane / 8 * 8;
#pragma unroll
    for (int k = 0; k + 32 <= kDim; k += 32) {
      uint32_t a[2][4];
      load_tiles(a[0], queries + k);
      load_tiles(a[1], queries + k + 16);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        uint32_t b[4];
        load_tiles(b, keys + n * 8 * Tile::kStride + k);
        multiply_tile<T>(score[n], a[0], b[0], b[1]);
        multiply_tile<T>(score[n], a[1], b[2], b[3]);
      }
    }
    if constexpr (kDim % 32 != 0) {
      constexpr int k = kDim / 32 * 32;
      uint32_t a[4];
      load_tiles(a, queries + k);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        uint32_t b[2];
        load_tiles(b, keys + n * 8 * Tile::kStride + k - lane / 16 * 16);
        multiply_tile<T>(score[n], a, b[0], b[1]);
      }
    }
  }

  // Scores become weights in shared memory; sums so far are rescaled to the new maxima.
  __device__ void weigh(int step, float (&score)[kKeyTiles][4]) {
    const float scale = call.p.scale * 1.44269504f;
    const int first = team * kKeyTiles * 8 + lane % 4 * 2;
    const int key = work.key_begin + step * Tile::kKeys + first;
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool seen = key + n * 8 + i % 2 <= last_key[i / 2];
        score[n][i] = seen ? score[n][i] * scale : -INFINITY;
        top[i / 2] = fmaxf(top[i / 2], score[n][i]);
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(kAllLanes, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(kAllLanes, top[h], 2));
      if (lane % 4 == 0) reduce[team * Tile::kRows + row(h)] = top[h];
    }
    __syncthreads();
    locate(step + 2);
    float base[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float now = most[h];
#pragma unroll
      for (int t = 0; t < Tile::kTeams; ++t) now = fmaxf(now, reduce[t * Tile::kRows + row(h)]);
      base[h] = now == -INFINITY ? 0.0f : now;
      const float shrink = power_of_two(most[h] - base[h]);
      most[h] = now;
      sum[h] *= shrink;
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) out[c][2 * h] *= shrink, out[c][2 * h + 1] *= shrink;
    }
    T* weights = shared + Tile::kWeights + first;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float w[2] = {power_of_two(score[n][2 * h] - base[h]),
                            power_of_two(score[n][2 * h + 1] - base[h])};
        sum[h] += w[0] + w[1];
        store_elements<T, 2>(weights + row(h) * Tile::kWeightStride + n * 8, w);
      }
    __syncthreads();
  }

  // out += weights times values.
  __device__ void multiply_values(int step) {
    const T* weights =
        shared + Tile::kWeights + (row_tile * 16 + lane % 16) * Tile::kWeightStride + lane / 16 * 8;
    const T* values = stage(step, 1) + lane * Tile::kStride;
#pragma unroll
    for (int k = 0; k < Tile::kKeys; k += 32) {
      uint32_t a[2][4];
      load_tiles(a[0], weights + k);
      load_tiles(a[1], weights + k + 16);
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        const int tile = c * Tile::kTeams + team;
        if (kDim / 8 % Tile::kTeams != 0 && tile >= kDim / 8) continue;
        uint32_t b[4];
        load_tiles_transposed(b, values + k * Tile::kStride + tile * 8);
        multiply_tile<T>(out[c], a[0], b[0], b[1]);
        multiply_tile<T>(out[c], a[1], b[2], b[3]);
      }
    }
  }

  // The sums of weights over a row's lanes and warps.
  __device__ void finish_sums() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 1);
      sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 2);
      if (lane % 4 == 0) reduce[team * Tile::kRows + row(h)] = sum[h];
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = 0;
#pragma unroll
      for (int t = 0; t < Tile::kTeams; ++t) sum[h] += reduce[t * Tile::kRows + row(h)];
    }
  }

  __device__ void store() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row(h) >= work.rows) continue;
      const bool whole = work.splits == 1;
      const float factor = whole ? __fdividef(1.0f, sum[h]) : 1.0f;
      const int64_t part = whole ? 0 : partial_row(call, work, work.split, row(h));
      if (!whole && team == 0 && lane % 4 == 0)
        call.partial_sum[part] = make_float2(most[h], sum[h]);
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        const int column = (c * Tile::kTeams + team) * 8 + lane % 4 * 2;
        if (column >= kDim) continue;
        float x[2] = {out[c][2 * h] * factor, out[c][2 * h + 1] * factor};
        if (whole) {
          store_output(call, work, row(h), column, x);
        } else {
          store_elements<float, 2>(call.partial + part * kDim + column, x);
        }
      }
    }
  }

  __device__ void run(int64_t index) {
    work = find_work(call, index);
    const int steps = max((work.key_end - work.key_begin + Tile::kKeys - 1) / Tile::kKeys, 0);
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
      for (float& x : out[c]) x = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      most[h] = -INFINITY;
      sum[h] = 0;
      last_key[h] = min(work.last_key(call, row(h)), work.key_end - 1);
    }
    __syncthreads();  // the piece before is done with the shared memory
    locate(0);
    locate(1);
    fetch_queries();
    __syncthreads();
    fetch(0);
    copy_async_commit();
    for (int step = 0; step < steps; ++step) {
      copy_async_wait_but<0>();
      __syncthreads();
      if (step + 1 < steps) fetch(step + 1);
      copy_async_commit();
      float score[kKeyTiles][4] = {};
      multiply_keys(step, score);
      weigh(step, score);
      multiply_values(step);
    }
    copy_async_wait_but<0>();
    __syncthreads();
    finish_sums();
    store();
    if (work.splits > 1)
      join_ranges<Tile::kThreads>(call, work, reinterpret_cast<float*>(stage(0, 0)));
  }
};

template <class T, int kDim, int kRowTiles, bool kShared>
__global__ void __launch_bounds__(AttentionTile<kDim, kRowTiles, kShared>::kThreads,
                                  AttentionTile<kDim, kRowTiles, kShared>::kBlocks)
    paged_attention_kernel(const __grid_constant__ AttentionCall call) {
  release_successor();
  extern __shared__ uint4 memory[];
  AttentionBlock<T, kDim, kRowTiles, kShared> block(call, reinterpret_cast<T*>(memory));
  wait_for_predecessor();
  const int64_t pieces = int64_t{call.plan->count} * call.p.cache.kv_heads;
  for (int64_t i = blockIdx.x; i < pieces; i += gridDim.x) block.run(i);
}

}  // namespace replayssm::cuda
