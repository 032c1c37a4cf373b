// The cursors of whole batches on a CUDA device (arithmetic: replay/cursor.h; the host's own:
// replay/cursors.h). Slots of -1 are padding. cursors: [slots], changed in place. These calls
// overlap no other kernel of their stream.
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/ops.h"

namespace replayssm::cuda {

// Empty sequences move in.
void reset_slots(const SequenceBatch& batch, Cursor* cursors, cudaStream_t stream);

// Before the layers of a step: begin_step of every sequence's cursor; forms batch.plan if there is
// one.
void begin_steps(const SequenceBatch& batch, Cursor* cursors, cudaStream_t stream);

// After the layers: commit_step with accepted[s] tokens. accepted: [sequences].
void commit_steps(const SequenceBatch& batch, const int32_t* accepted, Route route, Cursor* cursors,
                  cudaStream_t stream);

// After a prefill of the windows of query_start.
void commit_prefills(const SequenceBatch& batch, Cursor* cursors, cudaStream_t stream);

// After recurrent_fold of every layer: in place, or into target_slot, whose cursors become those of
// the folded sources while the sources' stay.
void commit_folds(const SequenceBatch& batch, const int32_t* target_slot, Cursor* cursors,
                  cudaStream_t stream);
inline void commit_folds(const SequenceBatch& batch, Cursor* cursors, cudaStream_t stream) {
  commit_folds(batch, nullptr, cursors, stream);
}

// After slot_copy of every layer.
void copy_cursors(const SequenceBatch& batch, const int32_t* target_slot, Cursor* cursors,
                  cudaStream_t stream);

}  // namespace replayssm::cuda
