// Barriers of some of a block's warps.
#pragma once

#include "block.h"

namespace replayssm::cuda {

inline void meet_warps(int barrier, int threads) { emulation::meet_threads(barrier, threads); }

}  // namespace replayssm::cuda
