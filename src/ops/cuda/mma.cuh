// Products of small tiles on the tensor cores: 16-bit operands, fp32 sums. In a tile of the result,
// c[0] and c[1] are columns 2 (lane % 4) and the next of row lane / 4, c[2] and c[3] those of the
// row eight below.
#pragma once

#include "ops/cuda/async_copy.cuh"
#include "ops/cuda/elements.cuh"
#include "ops/cuda/reduce.cuh"

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

// The same with fp32 numbers, whose last 13 bits are not taken, and a [16, 8], b [8, 8]. Lane l has
// rows l / 4 and the eighth behind it of a and column l / 4 of b, columns, or rows, l % 4 and the
// fourth behind it.
__device__ inline void multiply_halves_tile(float (&c)[4], const float4& a, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)),
        "r"(__float_as_uint(a.w)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
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

// The other way.
__device__ inline void store_tiles(void* row, const uint32_t (&tile)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(tile[0]), "r"(tile[1]), "r"(tile[2]), "r"(tile[3])
      : "memory");
#else
  const uint32_t mine = shared_address(row), lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = __shfl_sync(kAllLanes, mine, 8 * i + lane / 4) + lane % 4 * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(tile[i]) : "memory");
  }
#endif
}

}  // namespace replayssm::cuda
