// Correctly rounded division and roots of ordinary numbers. The compiler's own call a function for
// zeros, infinities and subnormals, and registers that live across a call spill.
#pragma once

namespace replayssm::cuda {

// 1 / d for d in [2^-100, 2^100].
__device__ inline float rounded_inverse(float d) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return __fmaf_rn(r, -__fmaf_rn(d, r, -1.0f), r);
}

// x / d for d in [1, 2^100] and |x| in [2^-20, 2^100].
__device__ inline float rounded_quotient(float x, float d) {
  const float r = rounded_inverse(d), q = __fmul_rn(x, r);
  return __fmaf_rn(__fmaf_rn(-q, d, x), r, q);
}

// The root of x in [2^-60, 2^100].
__device__ inline float rounded_root(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  const float root = __fmul_rn(x, r);
  return __fmaf_rn(__fmul_rn(0.5f, r), __fmaf_rn(-root, root, x), root);
}

}  // namespace replayssm::cuda
