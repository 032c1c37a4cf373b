// Argument checks of paged decode steps, shared by every backend. Contents of arrays are the
// caller's contract.
#pragma once

#include "ops/paged.h"

namespace replayssm {

void check_paged(const PagedStep& step);
void check_paged(const PagedCursors& cursors, const PagedIntegers& rows);

}  // namespace replayssm
