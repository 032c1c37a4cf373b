// Decode steps over caches of another engine on the CPU (contracts: replayssm/paged.h).
#pragma once

#include "core/thread_pool.h"
#include "ops/paged.h"

namespace replayssm::cpu {

void paged_step(const PagedStep& step, ThreadPool& pool);
void paged_commit(const PagedCursors& cursors, const PagedIntegers& accepted);
void paged_reset(const PagedCursors& cursors, const PagedIntegers& first);

}  // namespace replayssm::cpu
