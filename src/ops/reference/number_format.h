// Storage formats by their definition: every code has a value, and a number is stored as the code
// of the nearest value. The oracle of read copies, checkpoints and their rounding, bit for bit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "replayssm/ops.h"
#include "replayssm/types.h"

namespace replayssm::reference {

// The value of a code of a 16-bit or 8-bit type.
double decode(DType dtype, uint32_t code);

// The code whose value is nearest; between two the even one. Beyond the largest value
// floating-point types of 16 bits have an infinity, 8-bit types saturate.
uint32_t encode(DType dtype, double value);

// The code of the value next to x towards zero, or of the one after it: away from zero where
// floor(2^16 f) + bits >= 2^16 with f the distance of x from the former in units of the gap.
uint32_t encode_stochastic(DType dtype, double value, uint16_t bits);

// The random bits of an element of a checkpoint (StochasticRounding in replayssm/ops.h).
// row: counted within the slot; `stored` is the token counter behind the last stored token.
uint16_t rounding_bits(uint64_t seed, int64_t stored, uint32_t stream, int64_t row, int64_t column,
                       int64_t state_dim);

// A row of a read copy (ReadCopy in replayssm/ops.h). float32 is stored as it is.
struct EncodedRow {
  std::vector<uint32_t> codes;
  float scale = 1;
};
EncodedRow encode_row(DType dtype, std::span<const float> row);
std::vector<double> decode_row(DType dtype, const EncodedRow& row);

}  // namespace replayssm::reference
