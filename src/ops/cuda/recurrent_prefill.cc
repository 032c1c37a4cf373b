#include "ops/cuda/recurrent_prefill.h"

#include "core/check.h"
#include "ops/check_params.h"
#include "ops/cuda/prefill_instances.h"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {
namespace {

// Whether chunks could take it, if there is a kernel for its head_dim.
bool takes_chunks(const RecurrentPrefillParams& p) {
  return p.shape.state_dim == 128 && p.state.activation_dtype == DType::kBFloat16 &&
         rows_aligned(p.v, p.v_stride * 2) && rows_aligned(p.k, p.k_stride * 2) &&
         rows_aligned(p.q, p.q_stride * 2) && rows_aligned(p.z, p.z_stride * 2) &&
         rows_aligned(p.gate, p.gate_stride * 2) && rows_aligned(p.channel_gate.bias) &&
         rows_aligned(p.o) && rows_aligned(p.state.checkpoint) &&
         rows_aligned(p.state.read_copy.data);
}

template <Family kFamily>
void launch(const RecurrentPrefillParams& p, cudaStream_t stream) {
  if (takes_chunks(p) && launch_prefill_chunks<kFamily>(p, stream)) return;
  const int64_t act = dtype_bytes(p.state.activation_dtype);
  const bool aligned = rows_aligned(p.state.checkpoint) && rows_aligned(p.state.read_copy.data) &&
                       rows_aligned(p.k, p.k_stride * act) && rows_aligned(p.q, p.q_stride * act) &&
                       rows_aligned(p.gate, p.gate_stride * act) &&
                       rows_aligned(p.channel_gate.bias);
  launch_prefill<kFamily>(p, aligned, stream);
}

}  // namespace

void recurrent_prefill(const RecurrentPrefillParams& p, cudaStream_t stream) {
  check_params(p);
  if (p.batch.sequences == 0) return;
  if (p.batch.sequences > 65535)
    fail("batch.sequences: expected at most 65535, got ", p.batch.sequences);
  if (p.rounding.seed != nullptr) fail("rounding.seed: expected null for prompts, got a pointer");
  if (p.shape.heads * p.shape.head_dim > INT32_MAX / kMaxStateDim)
    fail("shape.heads: expected fewer, got ", p.shape.heads, " of ", p.shape.head_dim, " rows");
  switch (p.shape.family) {
    case Family::kMamba2: return launch<Family::kMamba2>(p, stream);
    case Family::kGatedDelta: return launch<Family::kGatedDelta>(p, stream);
    case Family::kKimiDelta: return launch<Family::kKimiDelta>(p, stream);
  }
}

}  // namespace replayssm::cuda
