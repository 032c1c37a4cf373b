// Attention on the tensor cores, for 16-bit caches.
//
// A block takes pieces of work one behind another as one stream of steps of kKeys keys; the next
// kStages - 1 steps are in flight, whatever piece they belong to. A piece is a tile of queries of
// one sequence, kRows of them, and a range of the keys of one head. Warps come in row tiles of 16
// queries; the warps of a row tile share its keys while scores are formed and its columns while
// values are summed. Weights of a step pass through shared memory, rounded to the cache's type.
// Barriers per step: keys are here; row maxima are here; weights are here.
//
// Plans and block tables are read while the kernel before still runs.
#pragma once

#include "ops/cuda/attention_parts.cuh"
#include "ops/cuda/mma.cuh"

namespace replayssm::cuda {

template <int kDim, int kRowTiles, bool kShared>
struct AttentionTile {
  static constexpr int kRows = 16 * kRowTiles, kWarps = kRowTiles == 1 && kDim <= 256 ? 4 : 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTeams = kWarps / kRowTiles;  // warps of a row tile
  static constexpr bool kSmall = kRowTiles == 1;
  static constexpr int kKeys = kDim <= (kSmall ? 64 : 128) || kTeams == 8 ? 64 : 32;
  static constexpr int kStages = kSmall && kDim <= 128 ? 3 : 2;
  static constexpr int kStride = kDim + 8;  // rows of eight lanes meet no bank twice
  static constexpr int kWeightStride = kKeys + 8;
  static constexpr int kKeyTiles = kKeys / kTeams / 8;  // of a warp, eight keys each
  static constexpr int kColumnTiles = (kDim / 8 + kTeams - 1) / kTeams;  // of a warp, at most
  static constexpr int kSides = kShared ? 1 : 2;
  // Keys of a step that a lane locates; runs of eight elements that a thread fetches.
  static constexpr int kLaneKeys = kKeys / 32;
  static constexpr int kRuns = kDim / 8, kFetches = (kKeys * kRuns + kThreads - 1) / kThreads;

  // Shared memory. In 16-bit elements up to kEnd: queries and keys in rings of kStages.
  static constexpr int kTile = kRows * kStride, kSide = kKeys * kStride, kStage = kSides * kSide,
                       kStageStart = kStages * kTile, kWeights = kStageStart + kStages * kStage,
                       kEnd = kWeights + kRows * kWeightStride;
  static constexpr int kReduceBytes = kTeams * kRows * 4, kWorkBytes = kStages * 64;
  static_assert(sizeof(AttentionWork) <= 64);
  static constexpr int kBytes = kEnd * 2 + kReduceBytes + kWorkBytes;
  static constexpr int kFit = (227 << 10) / (kBytes + 1024);  // blocks of a multiprocessor
  static constexpr int kBlocks = kWarps > 4 ? 1 : kFit < 3 ? kFit : 3;
};

template <class T, int kDim, int kRowTiles, bool kShared>
struct AttentionBlock {
  using Tile = AttentionTile<kDim, kRowTiles, kShared>;
  static constexpr int kKeyTiles = Tile::kKeyTiles, kColumnTiles = Tile::kColumnTiles;

  const AttentionCall& call;
  T* shared;
  float* reduce;  // [teams, rows]
  int lane, row_tile, team;

  // The step that is fetched next, and what is known of it already.
  struct Ahead {
    AttentionWork work, next;  // next: the piece behind
    int index, piece, step, steps, count;
    const int32_t* table;  // of the sequence's blocks
    int block[Tile::kLaneKeys];
  } ahead;

  // The step at hand.
  AttentionWork work;
  int pieces, piece = 0, count = 0;  // how many were taken, and how many steps
  float out[kColumnTiles][4];
  float most[2], sum[2];  // of rows lane / 4 and 8 more; sum: this lane's share
  int last_key[2];

  __device__ AttentionBlock(const AttentionCall& call, T* memory)
      : call(call),
        shared(memory),
        reduce(reinterpret_cast<float*>(memory + Tile::kEnd)),
        lane(static_cast<int>(threadIdx.x) % 32),
        row_tile(static_cast<int>(threadIdx.x) / 32 % kRowTiles),
        team(static_cast<int>(threadIdx.x) / 32 / kRowTiles),
        pieces(call.plan->count * static_cast<int>(call.p.cache.kv_heads)) {
    ahead.index = static_cast<int>(blockIdx.x);
    ahead.piece = ahead.count = 0;
    if (ahead.index >= pieces) return;
    ahead.next = load_work(call, ahead.index);
    start_piece();
  }

  __device__ int row(int half) const { return row_tile * 16 + lane / 4 + 8 * half; }
  __device__ T* queries(int piece) const { return shared + piece % Tile::kStages * Tile::kTile; }
  __device__ T* stage(int count, int side) const {
    return shared + Tile::kStageStart + count % Tile::kStages * Tile::kStage +
           (kShared ? 0 : side * Tile::kSide);
  }
  __device__ AttentionWork& kept_work(int piece) const {
    char* const works = reinterpret_cast<char*>(reduce + Tile::kTeams * Tile::kRows);
    return *reinterpret_cast<AttentionWork*>(works + piece % Tile::kStages * 64);
  }

  __device__ void start_piece() {
    ahead.work = ahead.next;
    ahead.step = 0;
    ahead.steps = steps_of(ahead.work);
    ahead.table = call.p.batch.block_table + ahead.work.sequence * call.p.batch.block_table_stride;
    const int next = ahead.index + static_cast<int>(gridDim.x);
    if (next < pieces) ahead.next = load_work(call, next);
    find_blocks();
  }
  __device__ static int steps_of(const AttentionWork& work) {
    return (work.key_end - work.key_begin + Tile::kKeys - 1) / Tile::kKeys;
  }
  // A key of the step ahead.
  __device__ int ahead_key(int n) const {
    return ahead.work.key_begin + ahead.step * Tile::kKeys + n * 32 + lane;
  }
  __device__ void find_blocks() {
#pragma unroll
    for (int n = 0; n < Tile::kLaneKeys; ++n)
      if (ahead_key(n) < ahead.work.key_end)
        ahead.block[n] =
            __ldg(ahead.table + call.block_size.divide(static_cast<uint32_t>(ahead_key(n))));
  }

  // Starts the copies of the step ahead and goes on to the one behind it.
  __device__ void fetch() {
    if (ahead.index < pieces) {
      if (ahead.step == 0) {
        fetch_queries();
        if (threadIdx.x == 0) kept_work(ahead.piece) = ahead.work;
      }
      fetch_keys();
      ++ahead.count;
      if (++ahead.step < ahead.steps) {
        find_blocks();
      } else {
        ++ahead.piece;
        ahead.index += static_cast<int>(gridDim.x);
        if (ahead.index < pieces) start_piece();
      }
    }
    copy_async_commit();
  }
  __device__ void fetch_queries() {
    T* const to = queries(ahead.piece);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < Tile::kRows * Tile::kRuns;
         i += Tile::kThreads) {
      const int r = i / Tile::kRuns, column = i % Tile::kRuns * 8;
      const bool exists = r < ahead.work.rows;
      const T* from = static_cast<const T*>(call.p.q.data) +
                      ahead.work.offset(call, exists ? r : 0, call.p.q.stride, kDim) + column;
      copy_async_16_or_zero(to + r * Tile::kStride + column, from, exists);
    }
  }
  // Keys behind the range become zeros: what lies there may be NaN. A lane knows the places of its
  // own keys, in rows of the cache; those of the keys that it copies are other lanes'.
  __device__ void fetch_keys() {
    constexpr uint32_t kNowhere = ~0u;
    uint32_t place[Tile::kLaneKeys];
#pragma unroll
    for (int n = 0; n < Tile::kLaneKeys; ++n) {
      const auto key = static_cast<uint32_t>(ahead_key(n)), size = call.block_size.divisor;
      const uint32_t within = key - call.block_size.divide(key) * size;
      const uint32_t head = ahead.block[n] * call.kv_heads.divisor + ahead.work.kv_head();
      place[n] = ahead_key(n) < ahead.work.key_end ? head * size + within : kNowhere;
    }
    const T* const k = static_cast<const T*>(call.p.cache.k);
    const T* const v = static_cast<const T*>(call.p.cache.v);
    T* const to = stage(ahead.count, 0);
#pragma unroll
    for (int n = 0; n < Tile::kFetches; ++n) {
      const int i = static_cast<int>(threadIdx.x) + n * Tile::kThreads;
      if (Tile::kKeys * Tile::kRuns % Tile::kThreads != 0 && i >= Tile::kKeys * Tile::kRuns) break;
      const int r = i / Tile::kRuns, column = i % Tile::kRuns * 8;
      uint32_t row = __shfl_sync(kAllLanes, place[0], r % 32);
      if constexpr (Tile::kLaneKeys == 2) {
        const uint32_t other = __shfl_sync(kAllLanes, place[1], r % 32);
        row = r < 32 ? row : other;
      }
      const bool exists = row != kNowhere;
      const int64_t at = static_cast<int64_t>(exists ? row : 0u) * kDim + column;
      copy_async_16_or_zero(to + r * Tile::kStride + column, k + at, exists);
      if constexpr (!kShared)
        copy_async_16_or_zero(to + Tile::kSide + r * Tile::kStride + column, v + at, exists);
    }
  }

  // This warp's [16, 8 kKeyTiles] products of queries and keys.
  __device__ void multiply_keys(float (&score)[kKeyTiles][4]) const {
    const T* q = queries(piece) + (row_tile * 16 + lane % 16) * Tile::kStride + lane / 16 * 8;
    const T* keys =
        stage(count, 0) + (team * kKeyTiles * 8 + lane % 8) * Tile::kStride + lane / 8 * 8;
    constexpr int kAtOnce = kDim > 256 ? 2 : 8;  // registers are short
#pragma unroll kAtOnce
    for (int k = 0; k + 32 <= kDim; k += 32) {
      uint32_t a[2][4];
      load_tiles(a[0], q + k);
      load_tiles(a[1], q + k + 16);
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
      load_tiles(a, q + k);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        uint32_t b[2];
        load_tiles(b, keys + n * 8 * Tile::kStride + k - lane / 16 * 16);
        multiply_tile<T>(score[n], a, b[0], b[1]);
      }
    }
  }

  // Of keys in a tree's window, those of strangers to a row's token.
  __device__ void hide_strangers(int key, float (&score)[kKeyTiles][4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row(h) >= work.rows) continue;
      const uint64_t ancestors = work.ancestors(call, row(h));
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!work.sees(ancestors, key + n * 8 + i)) score[n][2 * h + i] = -INFINITY;
    }
  }

  // Scores become weights in shared memory; sums so far are rescaled to the new maxima.
  __device__ void weigh(int step, float (&score)[kKeyTiles][4]) {
    const float scale = call.p.scale * 1.44269504f;
    const int first = team * kKeyTiles * 8 + lane % 4 * 2;
    const int key = work.key_begin + step * Tile::kKeys + first;
    if (call.p.batch.ancestors) hide_strangers(key, score);
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
  __device__ void multiply_values() {
    const T* weights =
        shared + Tile::kWeights + (row_tile * 16 + lane % 16) * Tile::kWeightStride + lane / 16 * 8;
    const T* values = stage(count, 1) + lane * Tile::kStride;
#pragma unroll 1
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
      const int64_t part =
          whole ? 0 : partial_row(call, work.sequence, work.kv_head(), work.split, row(h));
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

  __device__ void begin_piece() {
    work = kept_work(piece);
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
  }
  __device__ void end_piece() {
    __syncthreads();  // all have read the maxima
    finish_sums();
    store();
  }

  __device__ void run() {
#pragma unroll
    for (int i = 0; i < Tile::kStages - 1; ++i) fetch();
    for (int index = static_cast<int>(blockIdx.x); index < pieces;
         index += static_cast<int>(gridDim.x), ++piece) {
      int step = 0, steps = 1;
      for (; step < steps; ++step, ++count) {
        copy_async_wait_but<Tile::kStages - 2>();
        __syncthreads();
        if (step == 0) {
          begin_piece();
          steps = steps_of(work);
        }
        fetch();
        float score[kKeyTiles][4] = {};
        multiply_keys(score);
        weigh(step, score);
        multiply_values();
      }
      end_piece();
    }
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
  block.run();
}

}  // namespace replayssm::cuda
