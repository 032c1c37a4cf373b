// The readout of an int8 read copy by products of bytes.
#pragma once

#include <cstdint>

#include "ops/cpu/recurrent_prefetch.h"

namespace replayssm::cpu {

// One head's rows of an int8 read copy: codes [head_dim, state_dim], scale [head_dim].
struct Int8Rows {
  const int8_t* codes;
  const float* scale;
  int64_t head_dim, state_dim;
};

// o[row] += scale[row] (codes[row] . t) for all rows of the head. t: scratch memory, zero from
// state_dim up to padded(state_dim); its elements are taken as multiples of 2^-23 of the largest.
// False, and nothing is done, where the machine has no AVX-512 products of bytes, or state_dim is
// above 256.
bool read_int8(const Int8Rows& rows, const float* t, float* o, Prefetcher& prefetcher);

}  // namespace replayssm::cpu
