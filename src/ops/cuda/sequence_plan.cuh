// Reading the plan of a step, which the kernel before may have written just now.
#pragma once

#include "replayssm/ops.h"

namespace replayssm::cuda {

__device__ inline SequencePlan planned_sequence(const SequenceBatch& batch, int64_t place) {
  static_assert(sizeof(SequencePlan) == 2 * sizeof(uint4));
  const auto* const from = reinterpret_cast<const uint4*>(batch.plan + place);
  const uint4 words[2] = {__ldcg(from), __ldcg(from + 1)};
  return *reinterpret_cast<const SequencePlan*>(words);
}

}  // namespace replayssm::cuda
