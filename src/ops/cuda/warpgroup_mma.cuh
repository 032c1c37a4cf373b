// Products by the tensor cores of a warpgroup, four warps, with both operands in shared memory
// (sm_90a): c [64, n] += a [64, 16] b [n, 16]^T, both bfloat16.
//
// c lies as in mma.cuh, tile after tile of 8 columns: warp w has rows 16 w to 16 w + 15.
#pragma once

#include <cstdint>

// Whether this pass of the compiler is for devices that have them.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define REPLAYSSM_HAS_WARPGROUPS 1
#else
#define REPLAYSSM_HAS_WARPGROUPS 0
#endif

namespace replayssm::cuda {

inline constexpr int kWarpgroup = 128, kWarpgroupRows = 64, kWarpgroupDepth = 16;

// An operand's rows of 128 bytes, as copies with the 128-byte swizzle leave them from a multiple of
// 1024 bytes on; the address may be some multiple of 32 bytes into the rows.
__device__ inline uint64_t swizzled_rows(uint32_t shared) {
  constexpr uint64_t kSwizzle = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle | kEightRows | uint64_t{1} << 16 | (shared >> 4 & 0x3fff);
}

// Before the first product that adds to registers written otherwise.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All but the newest kGroups groups have ended.
template <int kGroups>
__device__ inline void wait_products_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Operands of an instruction: 24 sums at a time, then the two matrices.
#define REPLAYSSM_SUMS8(c, i)                                                                 \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define REPLAYSSM_SUMS24(c, i) \
  REPLAYSSM_SUMS8(c, i), REPLAYSSM_SUMS8(c, i + 8), REPLAYSSM_SUMS8(c, i + 16)
#define REPLAYSSM_NAMES0 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define REPLAYSSM_NAMES24                                                                     \
  ",%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45," \
  "%46,%47"
#define REPLAYSSM_NAMES48                                                                     \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69," \
  "%70,%71"
#define REPLAYSSM_NAMES72                                                                     \
  ",%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93," \
  "%94,%95"
#define REPLAYSSM_MULTIPLY(shape, names, ab, ...)                                           \
  asm volatile(                                                                             \
      "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" shape \
      "k16.f32.bf16.bf16 {" names "}, " ab ", add, 1, 1, 0, 0;\n}\n"                        \
      : __VA_ARGS__                                                                         \
      : "l"(a), "l"(b))

// By all threads of the warpgroup. Asynchronous: c is to be left alone until the product has ended.
template <int kColumns>
__device__ inline void multiply_rows(float (&c)[kColumns / 2], uint64_t a, uint64_t b) {
  static_assert(kColumns == 96 || kColumns == 144 || kColumns == 192);
  if constexpr (kColumns == 96) {
    REPLAYSSM_MULTIPLY("96", REPLAYSSM_NAMES0 REPLAYSSM_NAMES24, "%48, %49", REPLAYSSM_SUMS24(c, 0),
                       REPLAYSSM_SUMS24(c, 24));
  } else if constexpr (kColumns == 144) {
    REPLAYSSM_MULTIPLY("144", REPLAYSSM_NAMES0 REPLAYSSM_NAMES24 REPLAYSSM_NAMES48, "%72, %73",
                       REPLAYSSM_SUMS24(c, 0), REPLAYSSM_SUMS24(c, 24), REPLAYSSM_SUMS24(c, 48));
  } else {
    REPLAYSSM_MULTIPLY("192",
                       REPLAYSSM_NAMES0 REPLAYSSM_NAMES24 REPLAYSSM_NAMES48 REPLAYSSM_NAMES72,
                       "%96, %97", REPLAYSSM_SUMS24(c, 0), REPLAYSSM_SUMS24(c, 24),
                       REPLAYSSM_SUMS24(c, 48), REPLAYSSM_SUMS24(c, 72));
  }
}

#undef REPLAYSSM_MULTIPLY
#undef REPLAYSSM_NAMES72
#undef REPLAYSSM_NAMES48
#undef REPLAYSSM_NAMES24
#undef REPLAYSSM_NAMES0
#undef REPLAYSSM_SUMS24
#undef REPLAYSSM_SUMS8

}  // namespace replayssm::cuda
