// What a row that flushes folds into its state, on the tensor cores: 16 rows of the state where
// they lie in shared memory. Weighted values of those rows are an instruction's 16 vectors, columns
// of the cached keys its rows; lanes have the words of a state that PagedTokens reads.
#pragma once

#include "ops/cuda/paged_tiles.cuh"

namespace replayssm::cuda {

// In kParts turns, each of as many columns: the keys of one are held in registers.
template <class Act, class State, int kState, int kParts>
class PagedFold {
 public:
  using Map = QuadMap<State, kState>;
  static constexpr int kElems = Map::kElems, kWords = Map::kWords / kParts;  // of a part
  static constexpr int kStaged = kPagedStaged / 8;  // tiles of eight cached rows held in registers

  // A pair of cached rows in two rows of the state, one of each group of eight.
  using Pair = float[2][2];

  __device__ PagedFold(const PagedStep& p, const PagedItem& b, bool wraps, const float* weights)
      : p_(p),
        b_(b),
        wraps_(wraps),
        weights_(weights),
        group_(threadIdx.x % 32 / 4),
        quarter_(threadIdx.x % 4) {}

  // Keys of the first tiles, of the first part.
  __device__ void load_keys() {
#pragma unroll
    for (int u = 0; u < kStaged; ++u) {
      find_keys(u, from_[u]);
#pragma unroll
      for (int n = 0; n < kWords; ++n) load_word(u, n, n);
    }
  }
  // values(u, v): of tile u's pair.
  template <class Values>
  __device__ void weigh(float factor, Values&& values) {
#pragma unroll
    for (int u = 0; u < kStaged; ++u) writes_[u] = weighted(u, factor, values);
  }

  // A part of S = factor (decay S + sum_j w_j v_j k_j) + own k; parts come in order. word(g, w):
  // this lane's word w of the group's row; own: what a new token writes in this lane's rows.
  template <class Values, class Word>
  __device__ void run(int part, float decay, float factor, const float (&own)[2],
                      const Act* own_key, Values&& values, Word&& word) {
    const int tiles = (b_.row.history + 7) / 8;
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      const int w = part * kWords + n;
      PagedProducts sums[kElems / 2];
#pragma unroll
      for (int u = 0; u < kStaged; ++u) {
        if (u < tiles) add(writes_[u], keys_[u][n], sums);
        if (part + 1 < kParts) load_word(u, n, w + kWords);
      }
#pragma unroll 1
      for (int u = kStaged; u < tiles; ++u) {
        const Act* from[2];
        find_keys(u, from);
        Raw<Act, kElems> keys[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) keys[e].load(from[e] + Map::element(w, 0));
        add(weighted(u, factor, values), keys, sums);
      }
      float k[kElems] = {};
      if (own_key != nullptr) load_elements<Act, kElems>(own_key + Map::element(w, quarter_), k);
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        uint4& place = word(g, w);
        float s[kElems];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          widen<State>(reinterpret_cast<const uint32_t*>(&place)[i], s + i * (kElems / 4));
#pragma unroll
        for (int e = 0; e < kElems; ++e)
          s[e] = fmaf(own[g], k[e], fmaf(factor * decay, s[e], sums[e / 2].sum(2 * g + e % 2)));
        store_elements<State, kElems>(&place, s);
      }
    }
  }

 private:
  __device__ int cached_row(int u, int e) const { return 8 * u + 2 * quarter_ + e; }
  // Word w of the tile's keys, as the part's n-th.
  __device__ void load_word(int u, int n, int w) {
#pragma unroll
    for (int e = 0; e < 2; ++e) keys_[u][n][e].load(from_[u][e] + Map::element(w, 0));
  }
  // Where this lane's columns of a tile's pair of keys begin; those of any key where there is none.
  __device__ void find_keys(int u, const Act* (&keys)[2]) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = max(min(cached_row(u, e), b_.row.history - 1), 0);
      keys[e] = at<Act>(p_.cache_k, b_.row.slot, b_.key_head, b_.row.place(j, p_.ring, wraps_)) +
                Map::element(0, group_ / 2);
    }
  }
  template <class Values>
  __device__ float4 weighted(int u, float factor, Values&& values) const {
    Pair v;
    values(u, v);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = cached_row(u, e);
      const float weight = j < b_.row.history ? factor * weights_[j] : 0.0f;
#pragma unroll
      for (int g = 0; g < 2; ++g) v[e][g] *= weight;
    }
    return {v[0][0], v[0][1], v[1][0], v[1][1]};
  }
  __device__ void add(const float4& write, const Raw<Act, kElems> (&keys)[2],
                      PagedProducts (&sums)[kElems / 2]) const {
    const PagedVectors<true> vectors(write);
    const bool odd = group_ % 2 != 0;
    float k[2][kElems];
#pragma unroll
    for (int e = 0; e < 2; ++e) keys[e].read(k[e]);
#pragma unroll
    for (int pair = 0; pair < kElems / 2; ++pair)
      sums[pair].add(vectors, PagedRows<kIsWide<Act>>(odd ? k[0][2 * pair + 1] : k[0][2 * pair],
                                                      odd ? k[1][2 * pair + 1] : k[1][2 * pair]));
  }

  const PagedStep& p_;
  const PagedItem& b_;
  const bool wraps_;
  const float* const weights_;
  const int group_, quarter_;  // which row of eight this lane has, and which quarter of it
  float4 writes_[kStaged];
  const Act* from_[kStaged][2];
  Raw<Act, kElems> keys_[kStaged][kWords][2];
};

}  // namespace replayssm::cuda
