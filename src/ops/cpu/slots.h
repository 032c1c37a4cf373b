// Ops on all that a layer keeps of a slot (contracts: replayssm/ops.h).
#pragma once

#include "core/thread_pool.h"
#include "replayssm/ops.h"

namespace replayssm::cpu {

void slot_clear(const SlotClearParams& params, ThreadPool& pool);
void slot_copy(const SlotCopyParams& params, ThreadPool& pool);
void compact(const CompactParams& params, ThreadPool& pool);

}  // namespace replayssm::cpu
