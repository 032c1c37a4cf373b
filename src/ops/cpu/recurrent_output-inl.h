// What follows the readout of a token, compiled once per instruction set (included after
// foreach_target.h).
#if defined(REPLAYSSM_OPS_CPU_RECURRENT_OUTPUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_CPU_RECURRENT_OUTPUT_INL_H_
#undef REPLAYSSM_OPS_CPU_RECURRENT_OUTPUT_INL_H_
#else
#define REPLAYSSM_OPS_CPU_RECURRENT_OUTPUT_INL_H_
#endif

#include <cstring>

#include "core/dispatch.h"
#include "ops/cpu/recurrent-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {

// A token's output of one head: (readout + skip v) silu(z) in the output's dtype.
template <class ActT>
void write_output(const RecurrentStepParams& p, int64_t token, int64_t head, const float* readout) {
  const D d;
  const int64_t size = p.shape.head_dim;
  const ActT* v = static_cast<const ActT*>(p.v) + token * p.v_stride + head * size;
  const ActT* z = static_cast<const ActT*>(p.z);
  if (z != nullptr) z += token * p.z_stride + head * size;
  dispatch_float(p.o_dtype, [&]<class OutT>() {
    OutT* o = static_cast<OutT*>(p.o) + (token * p.shape.heads + head) * size;
    ForVectors(d, static_cast<size_t>(size), [&](size_t i, auto n) {
      auto x = hn::Load(d, readout + i);
      if (p.skip != nullptr) x = hn::MulAdd(hn::Set(d, p.skip[head]), LoadF32N(d, v + i, n), x);
      if (z != nullptr) x = hn::Mul(x, SiluF32(d, LoadF32N(d, z + i, n)));
      StoreF32N(x, d, o + i, n);
    });
  });
}

// The outputs of padding: zero.
inline void clear_outputs(const RecurrentStepParams& p, const Block& block, int64_t first_token,
                          int64_t tokens) {
  const int64_t row = p.shape.head_dim * dtype_bytes(p.o_dtype);
  for (int64_t t = first_token; t < first_token + tokens; ++t) {
    std::memset(static_cast<char*>(p.o) + (t * p.shape.heads + block.head_begin) * row, 0,
                (block.head_end - block.head_begin) * row);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
