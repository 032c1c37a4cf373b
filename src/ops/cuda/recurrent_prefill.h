// The recurrence over long windows on CUDA devices (contract: RecurrentPrefillParams in
// replayssm/ops.h, with device pointers).
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/ops.h"

namespace replayssm::cuda {

// Reads and writes checkpoint and read copy; the rings of all slots must be empty, and a slot that
// is new to its sequence cleared (slot_clear). commit_prefills moves the cursors behind the last
// layer. Windows are chains of any length: captured calls stay valid whatever the lengths become.
// Rounds to nearest even.
//
// A call overlaps the kernel before it in the stream: that must not write slots and query starts.
void recurrent_prefill(const RecurrentPrefillParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
