// 8-bit storage types of read copies: a row's elements are these times the row's scale.
#pragma once

#include <cstdint>

#include "core/half.h"

namespace replayssm {

struct e4m3 {  // sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities
  uint8_t bits;
};
struct int8 {
  int8_t bits;
};

template <>
constexpr DType dtype_of<e4m3>() {
  return DType::kFloat8E4M3;
}
template <>
constexpr DType dtype_of<int8>() {
  return DType::kInt8;
}

}  // namespace replayssm
