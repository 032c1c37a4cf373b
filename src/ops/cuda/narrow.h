// Matrix products of the rows of a batch that decodes: a stream of the weight through the copy
// engine into products of warpgroups (sm_90a).
#pragma once

#include <vector>

#include "ops/cuda/linear.h"

namespace replayssm::cuda {

inline constexpr int64_t kLeastNarrowRows = 33, kMostNarrowRows = 128;

// How a product is cut: blocks have `weight_rows` rows of the weight and one of `parts` ranges of
// its columns.
struct NarrowTile {
  int weight_rows = 0;
  int parts = 1;
};

// The cuts that may be the fastest on this device; none where narrow_product cannot compute it: one
// head, 33 to 128 rows, bfloat16, rows of everything at multiples of 16 bytes. More than one
// part only where params.parts allows it.
std::vector<NarrowTile> narrow_tiles(const LinearParams& params);

// The weight is read before the kernel enqueued just before has ended: it must not write it. The
// activation of params is applied. y has as many parts as the tile, whose sum is the product.
void narrow_product(const LinearParams& params, const NarrowTile& tile, cudaStream_t stream);

}  // namespace replayssm::cuda
