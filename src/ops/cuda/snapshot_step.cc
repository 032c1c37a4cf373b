#include "ops/cuda/snapshot_step.h"

#include "core/check.h"
#include "ops/check_params.h"
#include "ops/cuda/snapshot_instances.h"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {

void snapshot_step(const SnapshotStepParams& p, cudaStream_t stream) {
  check_params(p);
  if (p.batch.sequences == 0) return;
  if (p.batch.sequences > 65535)
    fail("batch.sequences: expected at most 65535, got ", p.batch.sequences);
  if (p.rounding.seed != nullptr) fail("rounding.seed: expected null for snapshots, got a pointer");
  if (p.shape.heads * p.shape.head_dim > INT32_MAX / kMaxStateDim)
    fail("shape.heads: expected fewer, got ", p.shape.heads, " of ", p.shape.head_dim, " rows");
  const int64_t act = dtype_bytes(p.state.activation_dtype);
  const bool aligned = rows_aligned(p.state.checkpoint) && rows_aligned(p.snapshots) &&
                       rows_aligned(p.k, p.k_stride * act) && rows_aligned(p.q, p.q_stride * act) &&
                       rows_aligned(p.gate, p.gate_stride * act) &&
                       rows_aligned(p.channel_gate.bias);
  switch (p.shape.family) {
    case Family::kMamba2: return launch_snapshot<Family::kMamba2>(p, aligned, stream);
    case Family::kGatedDelta: return launch_snapshot<Family::kGatedDelta>(p, aligned, stream);
    case Family::kKimiDelta: return launch_snapshot<Family::kKimiDelta>(p, aligned, stream);
  }
}

}  // namespace replayssm::cuda
