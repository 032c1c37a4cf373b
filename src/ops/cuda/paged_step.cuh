// Decode steps of one token or of a window over paged caches, on the tensor cores.
//
// Grid: (items, sequences), an item being a piece of a head's rows; every warp takes one and shares
// nothing with the others of its block. Its lanes start the first tiles of the state. Meanwhile the
// warp lays queries (Gated Delta: and keys) out as columns of one matrix in shared memory and forms
// the decays and, from products of all keys with these columns, the factors of the cached values.
// Then, tile by tile of 16 rows, for token s of the window
//
//   r_s = P_s (a S q_s + sum_j w_j (k_j . q_s) v_j)                       j over the cached rows
//   o_s = r_s + sum_{i <= s} w_i D_is (k_i . q_s) v_i                     i over the window
//
// where v_i is the token's own value, for Gated Delta d_i = beta_i (v_i - the same sum with k_i for
// q, over rows before i). A window that flushes folds its cached rows into S first and stores it; a
// single token that does folds them and itself afterwards. Products take numbers of 11 bits: an
// fp32 one counts as the sum of two of them.
#pragma once

#include "ops/cuda/paged_factors.cuh"
#include "ops/cuda/paged_stream.cuh"

namespace replayssm::cuda {

template <replayssm_family kFamily, class Act, class State, int kTiles>
class PagedTiles {
 public:
  static constexpr bool kDelta = kFamily != REPLAYSSM_MAMBA2;
  using Stream = PagedStream<Act, State, kTiles, kDelta>;
  using Factors = PagedFactors<kFamily, Act, kTiles>;
  using Pair = typename Stream::Pair;
  static constexpr int kRun = Stream::kRun, kBlock = Stream::kBlock;
  static constexpr bool kWideAct = sizeof(Act) == 4, kWideState = sizeof(State) == 4;

  __device__ PagedTiles(const PagedStep& p, const PagedLaunch& launch,
                        const PagedTileLayout& layout, const PagedItem& b, char* shared)
      : p_(p), b_(b), stream_(p, launch, layout, b, shared), f_(p, layout, b, shared) {}

  __device__ void run() {
    stream_.start();
    f_.form();
    f_.scales(scale_);
    const int tiles = stream_.tiles();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      stream_.wait();
      float sum[kTiles][4] = {};
      read_state(tile, sum);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n][i] *= scale_[n][i % 2];
      mix(tile, sum);
      float d[2] = {};
      if constexpr (kDelta) {
        finish_delta(tile, sum, d);
      } else {
        finish_rows(tile, sum);
      }
      if (f_.single && b_.row.flushes) fold_tile(tile, d);
      stream_.fetch(tile + kPagedDepth);
    }
  }

 private:
  __device__ int quad() const { return stream_.quad; }
  __device__ int group() const { return stream_.group; }
  __device__ int row_of(int tile) const { return b_.first_row + stream_.first(tile); }

  // sum += S [columns], S with its cached rows where a window flushes.
  __device__ void read_state(int tile, float (&sum)[kTiles][4]) const {
    const bool folds = !f_.single && b_.row.flushes && b_.row.history > 0;
#pragma unroll 2
    for (int block = 0; block < stream_.blocks; ++block) {
      float s[2][kRun];
      stream_.read(tile, block, s);
      if (folds) {
        fold_block(tile, block, s);
        stream_.store(tile, block, s);
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float x[kRun];
        load_elements<Act, kRun>(f_.vector(n * 8 + group()) + block * kBlock + quad() * kRun, x);
#pragma unroll
        for (int i = 0; i < kRun; i += 2)
          multiply_split<kWideState, kWideAct>(
              sum[n], make_float4(s[0][i], s[1][i], s[0][i + 1], s[1][i + 1]), x[i], x[i + 1]);
      }
    }
  }

  // S = decay S + the cached rows, and a single token of Mamba-2, with their weights.
  __device__ void fold_block(int tile, int block, float (&s)[2][kRun]) const {
    const float decay = f_.fold_decay();
    float c[kRun / 2][4];
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i)
#pragma unroll
      for (int n = 0; n < 4; ++n) c[i][n] = decay * s[n / 2][2 * i + n % 2];
    const int rows = f_.folded();
#pragma unroll 1
    for (int step = 0; step * 8 < rows; ++step) {
      float v[2][2], k[2][kRun];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = step * 8 + h * 4 + quad();
        const float weight = f_.fold_weight(j);
        stream_.values(tile, step, h).read(v[h]);
        v[h][0] *= weight, v[h][1] *= weight;
        load_elements<Act, kRun>(f_.key(min(j, rows - 1)) + block * kBlock + group() / 2 * kRun,
                                 k[h]);
      }
      const float4 a = make_float4(v[0][0], v[0][1], v[1][0], v[1][1]);
#pragma unroll
      for (int i = 0; i < kRun / 2; ++i) {
        const bool odd = group() % 2 == 1;
        multiply_split<true, kWideAct>(c[i], a, odd ? k[0][2 * i + 1] : k[0][2 * i],
                                       odd ? k[1][2 * i + 1] : k[1][2 * i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i)
#pragma unroll
      for (int n = 0; n < 4; ++n) s[n / 2][2 * i + n % 2] = c[i][n];
  }
  // After a single token that flushes. d: Gated Delta's, in this lane's rows.
  __device__ void fold_tile(int tile, const float (&d)[2]) const {
#pragma unroll 1
    for (int block = 0; block < stream_.blocks; ++block) {
      float s[2][kRun];
      stream_.read(tile, block, s);
      fold_block(tile, block, s);
      if constexpr (kDelta) {
        float k[kRun];
        load_elements<Act, kRun>(f_.vector(1) + block * kBlock + quad() * kRun, k);
        const float scale = f_.key_scale(0);
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int e = 0; e < kRun; ++e) s[r][e] = fmaf(d[r], scale * k[e], s[r][e]);
      }
      stream_.store(tile, block, s);
    }
  }

  // Adds the cached values, and those of Mamba-2's window, which it caches.
  __device__ void mix(int tile, float (&sum)[kTiles][4]) const {
#pragma unroll 1
    for (int step = f_.first_mixed() / 8; step * 8 < stream_.mixed(); ++step) {
      float v[2][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Pair pair = stream_.values(tile, step, h);
        pair.read(v[h]);
        if constexpr (!kDelta) cache_value(tile, step * 8 + h * 4 + quad(), pair);
      }
      const float4 a = make_float4(v[0][0], v[0][1], v[1][0], v[1][1]);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float* factors = f_.factors(step * 8 + quad()) + n * 8 + group();
        multiply_split<kWideAct, true>(sum[n], a, factors[0], factors[4 * f_.stride()]);
      }
    }
  }
  __device__ Act* cached(int i, int tile) const {
    return at<Act>(p_.cache_v, b_.row.slot, b_.head, f_.place(i)) + row_of(tile);
  }
  __device__ void cache_value(int tile, int j, const Pair& pair) const {
    const int i = j - b_.row.history;
    if (i >= 0 && i < b_.row.window && f_.keeps() && stream_.live(tile))
      *reinterpret_cast<typename Pair::W*>(cached(i, tile)) = pair.word;
  }

  __device__ void finish_rows(int tile, const float (&sum)[kTiles][4]) const {
    if (!stream_.live(tile)) return;
    const int row = row_of(tile);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = n * 8 + 2 * quad() + e;
        if (i >= b_.row.window) continue;
        const int64_t token = b_.row.token + i;
        float o[2] = {sum[n][e], sum[n][2 + e]};
        if (f_.finishes()) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            PagedFinish finish;
            finish.load(p_, token, b_.head, row + r);
            o[r] = finish.apply(
                p_, o[r],
                f_.mixes_skip() ? 0.0f : to_float(at<Act>(p_.v, token, b_.head)[row + r]));
          }
        }
        set_pair(p_.out, index(p_.out, token, b_.head) + row, o);
      }
  }

  // Solves for d of the window, token by token: token 4 n + t is lane t's of the four that share
  // rows. Gives d of the last one.
  __device__ void finish_delta(int tile, float (&sum)[kTiles][4], float (&d)[2]) const {
    const int row = row_of(tile), window = b_.row.window;
    float v[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) stream_.fresh(tile, n, v[n]);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll 1
      for (int t = 0; t < 4; ++t) {
        const int i = 4 * m + t;
        if (i >= window) break;
        const float beta = f_.beta(i);
#pragma unroll
        for (int r = 0; r < 2; ++r)
          d[r] = __shfl_sync(kAllLanes, beta * (v[m][r] - sum[m][2 * r + 1]), t, 4);
        if (quad() == t && stream_.live(tile)) {
          if (f_.keeps()) store_elements<Act, 2>(cached(i, tile), d);
        }
#pragma unroll
        for (int n = m; n < kTiles; ++n) {
          const float2 c = f_.coefficients(i, 4 * n + quad());
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            sum[n][2 * r] = fmaf(c.x, d[r], sum[n][2 * r]);
            sum[n][2 * r + 1] = fmaf(c.y, d[r], sum[n][2 * r + 1]);
          }
        }
      }
    }
    if (!stream_.live(tile)) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int i = 4 * n + quad();
      const float o[2] = {sum[n][0], sum[n][2]};
      if (i < window) set_pair(p_.out, index(p_.out, b_.row.token + i, b_.head) + row, o);
    }
  }

  const PagedStep& p_;
  const PagedItem& b_;
  Stream stream_;
  const Factors f_;
  float scale_[kTiles][2];
};

template <replayssm_family kFamily, class Act, class State, int kTiles>
__global__ void __launch_bounds__(32 * kPagedWarps, kTiles == 8 ? 2 : 3)
    paged_step_kernel(const __grid_constant__ PagedStep p,
                      const __grid_constant__ PagedLaunch launch,
                      const __grid_constant__ PagedTileLayout layout) {
  extern __shared__ __align__(256) char memory[];
  release_successor();
  wait_for_predecessor();
  const int warp = threadIdx.x / 32, item = blockIdx.x * launch.warps + warp;
  if (item >= launch.items(p)) return;
  const PagedItem b = paged_item(p, launch, item);
  if (b.row.slot < 0) return pad_outputs(p, launch, b);
  if (b.row.window <= 0 && !b.row.flushes) return;
  PagedTiles<kFamily, Act, State, kTiles>(p, launch, layout, b, memory + warp * layout.total).run();
}

}  // namespace replayssm::cuda
