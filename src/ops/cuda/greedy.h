// Sampling where no row asks for more than its likeliest token.
#pragma once

#include "ops/cuda/sampling.h"

namespace replayssm::cuda {

// What sample() does without `sampling`; its arguments have been checked.
void choose_likeliest(const SampleParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
