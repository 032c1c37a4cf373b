// Products of small tiles on the tensor cores: 16-bit operands, fp32 sums. In a tile of the result,
// c[0] and c[1] are columns 2 (lane % 4) and the next of row lane / 4, c[2] and c[3] those of the
// row eight below.
#pragma once

#include "ops/cuda/async_copy.cuh"
#include "ops/cuda/elements.cuh"

namespace replayssm::cuda {

// c [16, 8] += a [16, 16] b [16, 8].
template <class T>
__device__ inline void multiply_tile(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1) {
  if constexpr (std::is_same_v<T, Bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// 8 x 8 tiles of 16-bit elements out of shared memory; lane 8 i + r names row r of tile i. As the
// operand a the tiles are [rows 0-7, 8-15] x [columns 0-7, 8-15], rows first; as b of a transposed
// matrix, whose rows are the result's columns, tile i is columns 8 i to 8 i + 7 of eight rows.
__device__ inline void load_tiles(uint32_t (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_tiles(uint32_t (&x)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "r"(shared_address(row))
               : "memory");
}
// Each tile transposed: as b of a matrix as it lies, tile i is rows 8 i to 8 i + 7.
__device__ inline void load_tiles_transposed(uint32_t (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}

// Two numbers as the sum of two pairs of 16-bit ones: of bfloat16, which keeps 16 of their bits.
struct SplitPair {
  uint32_t high, low;
};
__device__ inline SplitPair split_pair(float x, float y) {
  float rest[2] = {x, y}, part[2];
  SplitPair split;
  split.high = narrow<Bf16>(rest);
  widen<Bf16>(split.high, part);
  rest[0] -= part[0];
  rest[1] -= part[1];
  split.low = narrow<Bf16>(rest);
  return split;
}

}  // namespace replayssm::cuda
