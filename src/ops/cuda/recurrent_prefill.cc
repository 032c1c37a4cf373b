#include "ops/cuda/recurrent_prefill.h"

#include "core/check.h"
#include "ops/check_params.h"
#include "ops/cuda/prefill_instances.h"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {

void recurrent_prefill(const RecurrentPrefillParams& p, cudaStream_t stream) {
  check_params(p);
  if (p.batch.sequences == 0) return;
  if (p.batch.sequences > 65535)
    fail("batch.sequences: expected at most 65535, got ", p.batch.sequences);
  if (p.rounding.seed != nullptr) fail("rounding.seed: expected null for prompts, got a pointer");
  if (p.shape.heads * p.shape.head_dim > INT32_MAX / kMaxStateDim)
    fail("shape.heads: expected fewer, got ", p.shape.heads, " of ", p.shape.head_dim, " rows");
  if (launch_prefill_chunks(p, stream)) return;
  const int64_t act = dtype_bytes(p.state.activation_dtype);
  const bool aligned = rows_aligned(p.state.checkpoint) && rows_aligned(p.state.read_copy.data) &&
                       rows_aligned(p.k, p.k_stride * act) && rows_aligned(p.q, p.q_stride * act) &&
                       rows_aligned(p.gate, p.gate_stride * act) &&
                       rows_aligned(p.channel_gate.bias);
  switch (p.shape.family) {
    case Family::kMamba2: return launch_prefill<Family::kMamba2>(p, aligned, stream);
    case Family::kGatedDelta: return launch_prefill<Family::kGatedDelta>(p, aligned, stream);
    case Family::kKimiDelta: return launch_prefill<Family::kKimiDelta>(p, aligned, stream);
  }
}

}  // namespace replayssm::cuda
