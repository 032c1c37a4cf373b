#include "ops/reference/number_format.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/check.h"
#include "core/philox.h"

namespace replayssm::reference {
namespace {

// Codes of magnitudes count upwards with their values; the sign is a bit of its own.
struct Format {
  int exponent_bits, mantissa_bits;
  uint32_t largest;  // code of the largest magnitude; 16-bit types: of infinity
  uint32_t sign;
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return {5, 10, 0x7c00, 0x8000};
    case DType::kBFloat16: return {8, 7, 0x7f80, 0x8000};
    case DType::kFloat8E4M3: return {4, 3, 0x7e, 0x80};
    case DType::kFloat32:
    case DType::kInt8: break;
  }
  fail("no floating-point code of ", dtype_name(dtype));
}

// Infinity counts as the power of two that it stands in the place of.
double magnitude(const Format& format, uint32_t code) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const auto exponent = static_cast<int>(code >> format.mantissa_bits);
  const double fraction =
      std::ldexp(code & ((1u << format.mantissa_bits) - 1), -format.mantissa_bits);
  return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
}

// The last code whose value is at most `value`.
uint32_t code_below(const Format& format, double value) {
  uint32_t below = 0, above = format.largest + 1;
  while (above - below > 1) {
    const uint32_t middle = (below + above) / 2;
    (magnitude(format, middle) <= value ? below : above) = middle;
  }
  return below;
}

}  // namespace

double decode(DType dtype, uint32_t code) {
  if (dtype == DType::kInt8) return static_cast<int8_t>(code);
  const Format format = format_of(dtype);
  const double value = magnitude(format, code & ~format.sign);
  return code & format.sign ? -value : value;
}

uint32_t encode(DType dtype, double value) {
  if (dtype == DType::kInt8)
    return static_cast<uint8_t>(std::nearbyint(std::clamp(value, -127.0, 127.0)));
  const Format format = format_of(dtype);
  const double size = std::abs(value);
  uint32_t code = code_below(format, size);
  if (code < format.largest) {
    const double middle = (magnitude(format, code) + magnitude(format, code + 1)) / 2;
    if (size > middle || (size == middle && code % 2 == 1)) ++code;
  }
  return code | (std::signbit(value) ? format.sign : 0);
}

uint32_t encode_stochastic(DType dtype, double value, uint16_t bits) {
  const Format format = format_of(dtype);
  const double size = std::abs(value);
  uint32_t code = code_below(format, size);
  if (code < format.largest) {
    const double low = magnitude(format, code), high = magnitude(format, code + 1);
    if (std::floor((size - low) / (high - low) * 0x1p16) + bits >= 0x1p16) ++code;
  }
  return code | (std::signbit(value) ? format.sign : 0);
}

uint16_t rounding_bits(uint64_t seed, int64_t stored, uint32_t stream, int64_t row, int64_t column,
                       int64_t state_dim) {
  constexpr int64_t kGroup = 8;
  const int64_t groups_of_row = (state_dim + kGroup - 1) / kGroup;
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  const auto high = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
  const auto counter = static_cast<uint64_t>(stored);
  const auto words =
      philox({low(counter), high(counter), stream, low(row * groups_of_row + column / kGroup)},
             {low(seed), high(seed)});
  const int64_t element = column % kGroup;
  return static_cast<uint16_t>(words[element / 2] >> (16 * (element % 2)));
}

EncodedRow encode_row(DType dtype, std::span<const float> row) {
  EncodedRow encoded;
  if (dtype == DType::kFloat32) {
    for (const float value : row) encoded.codes.push_back(std::bit_cast<uint32_t>(value));
    return encoded;
  }
  if (dtype_bytes(dtype) == 1) {
    float largest = 0;
    for (const float value : row) largest = std::max(largest, std::abs(value));
    encoded.scale = largest / dtype_max_8bit(dtype);
  }
  for (const float value : row)
    encoded.codes.push_back(encoded.scale == 0 ? 0 : encode(dtype, value / encoded.scale));
  return encoded;
}

std::vector<double> decode_row(DType dtype, const EncodedRow& row) {
  std::vector<double> values;
  for (const uint32_t code : row.codes) {
    values.push_back(dtype == DType::kFloat32 ? std::bit_cast<float>(code)
                                              : decode(dtype, code) * row.scale);
  }
  return values;
}

}  // namespace replayssm::reference
