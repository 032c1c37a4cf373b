// The recurrence over long windows on CUDA devices (contract: RecurrentPrefillParams in
// replayssm/ops.h, with device pointers).
#pragma once

#include <cuda_runtime_api.h>

#include "replayssm/ops.h"

namespace replayssm::cuda {

// Reads and writes checkpoint and read copy; the rings of all slots must be empty. A slot whose
// cursor stands where reset_slots leaves it still has its checkpoint read: it must have been
// cleared (slot_clear). commit_prefills moves the cursors behind the last layer. Windows of any
// length; captured calls stay valid whatever the lengths become. state_dim is 64, 128 or 256.
void recurrent_prefill(const RecurrentPrefillParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
