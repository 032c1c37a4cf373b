#include "ops/cuda/general_step.h"

#include "core/check.h"
#include "ops/cuda/general_instances.h"
#include "ops/cuda/vector_width.h"
#include "replay/cursor.h"

namespace replayssm::cuda {

void general_step(const RecurrentStepParams& p, bool folds_all, const int32_t* target_slot,
                  cudaStream_t stream) {
  if (p.batch.sequences == 0) return;
  if (p.batch.sequences > 65535)
    fail("batch.sequences: expected at most 65535, got ", p.batch.sequences);
  if (p.shape.heads * p.shape.head_dim > INT32_MAX / kMaxStateDim)
    fail("shape.heads: expected fewer, got ", p.shape.heads, " of ", p.shape.head_dim, " rows");
  const int64_t rows = ring_rows(p.batch.ring.buffer_len, p.batch.ring.max_window);
  if (rows > 65535) fail("batch.ring: expected at most 65535 rows, got ", rows);
  TokenLaunch launch;
  launch.ring_rows = FastDivide(static_cast<uint32_t>(rows));
  launch.folds_all = folds_all;
  launch.target_slot = target_slot;
  const int64_t act = dtype_bytes(p.state.activation_dtype);
  const bool aligned = rows_aligned(p.state.checkpoint) && rows_aligned(p.state.read_copy.data) &&
                       rows_aligned(p.k, p.k_stride * act) && rows_aligned(p.q, p.q_stride * act) &&
                       rows_aligned(p.gate, p.gate_stride * act) && rows_aligned(p.state.ring_k) &&
                       rows_aligned(p.state.ring_gate) && rows_aligned(p.channel_gate.bias);
  switch (p.shape.family) {
    case Family::kMamba2: return launch_general_step<Family::kMamba2>(p, launch, aligned, stream);
    case Family::kGatedDelta:
      return launch_general_step<Family::kGatedDelta>(p, launch, aligned, stream);
    case Family::kKimiDelta:
      return launch_general_step<Family::kKimiDelta>(p, launch, aligned, stream);
  }
}

}  // namespace replayssm::cuda
