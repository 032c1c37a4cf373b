// Matrix products of few rows: a stream of the weight and little else.
#pragma once

#include "ops/cuda/linear.h"

namespace replayssm::cuda {

inline constexpr int64_t kMostSkinnyRows = 8;

// Whether skinny_product computes it: one head, 16-bit types, rows of x and weight at multiples of
// 16 bytes, and an x that shared memory holds beside the stream.
bool is_skinny(const LinearParams& params);

// The weight is read before the kernel enqueued just before has ended: it must not write it. The
// activation of params is applied.
void skinny_product(const LinearParams& params, cudaStream_t stream);

}  // namespace replayssm::cuda
