// Tiles of matrices in the registers of a warp's lanes, and their products.
#pragma once

#include "block.h"
#include "ops/cuda/elements.cuh"
#include "ops/cuda/reduce.cuh"

namespace replayssm::cuda {

// Calls fn(row, column) with the places of a result's four numbers.
template <class Fn>
void for_results(Fn&& fn) {
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i) fn(i, lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
}

template <class T>
void multiply_tile(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::Shown& mine = emulation::shown(threadIdx.x % 32);
  std::copy(a, a + 4, mine.words);
  mine.words[4] = b0, mine.words[5] = b1;
  emulation::meet_warp();
  for_results([&](unsigned i, unsigned row, unsigned column) {
    double sum = c[i];
    for (unsigned pair = 0; pair < 8; ++pair) {
      float x[2], y[2];
      widen<T>(emulation::shown(row % 8 * 4 + pair % 4).words[pair / 4 * 2 + row / 8], x);
      widen<T>(emulation::shown(column * 4 + pair % 4).words[4 + pair / 4], y);
      sum += double{x[0]} * y[0] + double{x[1]} * y[1];
    }
    c[i] = static_cast<float>(sum);
  });
  emulation::meet_warp();
}

inline void multiply_halves_tile(float (&c)[4], const float4& a, float b0, float b1) {
  emulation::Shown& mine = emulation::shown(threadIdx.x % 32);
  const float numbers[6] = {a.x, a.y, a.z, a.w, b0, b1};
  for (int i = 0; i < 6; ++i) mine.words[i] = __float_as_uint(numbers[i]) & 0xffffe000u;
  emulation::meet_warp();
  for_results([&](unsigned i, unsigned row, unsigned column) {
    double sum = c[i];
    for (unsigned k = 0; k < 8; ++k)
      sum += double{__uint_as_float(
                 emulation::shown(row % 8 * 4 + k % 4).words[k / 4 * 2 + row / 8])} *
             __uint_as_float(emulation::shown(column * 4 + k % 4).words[4 + k / 4]);
    c[i] = static_cast<float>(sum);
  });
  emulation::meet_warp();
}

// Calls fn(tile, row) with the rows that the lanes name, 16 bytes each.
template <class Fn>
void with_rows(const void* row, int tiles, Fn&& fn) {
  emulation::shown(threadIdx.x % 32).pointer = row;
  emulation::meet_warp();
  for (int tile = 0; tile < tiles; ++tile)
    fn(tile, [&](unsigned r) {
      return static_cast<uint16_t*>(const_cast<void*>(emulation::shown(8 * tile + r).pointer));
    });
  emulation::meet_warp();
}

template <int kTiles>
void load_tiles(uint32_t (&x)[kTiles], const void* row) {
  const unsigned lane = threadIdx.x % 32;
  with_rows(row, kTiles, [&](int tile, auto&& at) {
    const uint16_t* const pair = at(lane / 4) + lane % 4 * 2;
    x[tile] = pair[0] | uint32_t{pair[1]} << 16;
  });
}
inline void load_tiles_transposed(uint32_t (&x)[4], const void* row) {
  const unsigned lane = threadIdx.x % 32;
  with_rows(row, 4, [&](int tile, auto&& at) {
    x[tile] = at(lane % 4 * 2)[lane / 4] | uint32_t{at(lane % 4 * 2 + 1)[lane / 4]} << 16;
  });
}
inline void store_tiles(void* row, const uint32_t (&x)[4]) {
  const unsigned lane = threadIdx.x % 32;
  with_rows(row, 4, [&](int tile, auto&& at) {
    uint16_t* const pair = at(lane / 4) + lane % 4 * 2;
    pair[0] = static_cast<uint16_t>(x[tile]);
    pair[1] = static_cast<uint16_t>(x[tile] >> 16);
  });
}

}  // namespace replayssm::cuda
