// Matrix products of very few rows: a stream of the weight and little else.
#pragma once

#include "ops/cuda/linear.h"

namespace replayssm::cuda {

inline constexpr int64_t kMostSkinnyRows = 4;

// Whether skinny_product computes it: one head, 16-bit types, rows of x and weight at multiples of
// 16 bytes.
bool is_skinny(const LinearParams& params);

// The weight is read before the kernel enqueued just before has ended: it must not write it.
void skinny_product(const LinearParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
