#include "ops/cpu/precision.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/half.h"
#include "core/philox.h"

namespace replayssm::cpu {
namespace {

using Element = Precision::Element;

// The floating-point formats. Integers are one of exponent_bits = 0: their steps are all 1.
struct Grid {
  const char* name;
  Element element;
  int bits;
  int least_exponent;  // of normal numbers
  int mantissa_bits;
  float largest;
  bool scaled;
};

constexpr Grid kGrids[] = {
    {"float32", Element::kFloat32, 32, -126, 23, 0x1.fffffep127f, false},
    {"float16", Element::kFloat16, 16, -14, 10, 65504, false},
    {"bfloat16", Element::kBFloat16, 16, -126, 7, 0x1.fep127f, false},
    {"e4m3", Element::kFloat8E4M3, 8, -6, 3, 448, true},
    {"e2m1", Element::kFloat4E2M1, 4, 0, 1, 6, true},
};

Grid grid_of(const Precision& precision) {
  for (const Grid& grid : kGrids) {
    if (grid.element == precision.element) return grid;
  }
  const int size = precision.bits - 1;  // of a magnitude below 2^size all steps are 1
  return {"int", Element::kInteger, precision.bits, size, size, static_cast<float>((1 << size) - 1),
          true};
}

// The distance between neighbours around x.
float step_at(const Grid& grid, float x) {
  const auto exponent = static_cast<int>((std::bit_cast<uint32_t>(x) >> 23) & 0xff) - 127;
  const int step = std::max(exponent, grid.least_exponent) - grid.mantissa_bits;
  return std::bit_cast<float>(static_cast<uint32_t>(std::max(step, -126) + 127) << 23);
}

// To nearest, ties to even: the sum has no bits below the step.
float nearest(const Grid& grid, float x) {
  const float anchor = 0x1.8p23f * step_at(grid, x);
  const float rounded = (x + anchor) - anchor;
  return std::clamp(rounded, -grid.largest, grid.largest);
}

// Away from zero with the probability of its distance from the neighbour towards zero.
float stochastic(const Grid& grid, float x, uint32_t bits) {
  const float step = step_at(grid, x);
  const double steps = std::abs(double{x}) / step + bits * 0x1p-32;
  const auto size = static_cast<float>(static_cast<int64_t>(steps)) * step;
  return std::copysign(std::min(size, grid.largest), x);
}

void round_block(const Precision& precision, const Grid& grid, const RowRandom& random,
                 int64_t group, std::span<float> block) {
  float scale = 1;
  if (grid.scaled) {
    float largest = 0;
    for (const float value : block) largest = std::max(largest, std::abs(value));
    scale = largest / grid.largest;
    if (scale < std::numeric_limits<float>::min()) {
      std::ranges::fill(block, 0.0f);
      return;
    }
  }
  std::array<uint32_t, 4> bits{};
  for (size_t i = 0; i < block.size(); ++i) {
    if (!precision.stochastic) {
      block[i] = scale * nearest(grid, block[i] / scale);
      continue;
    }
    if (i % 4 == 0) {
      const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
      const auto high = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
      const auto position = static_cast<uint64_t>(random.position);
      bits = philox(
          {low(position), high(position), random.stream, low(static_cast<uint64_t>(group) + i / 4)},
          {low(random.seed), high(random.seed)});
    }
    block[i] = scale * stochastic(grid, block[i] / scale, bits[i % 4]);
  }
}

}  // namespace

std::optional<Precision> parse_precision(std::string_view text) {
  Precision precision;
  constexpr std::string_view kStochastic = "-sr";
  precision.stochastic = text.ends_with(kStochastic);
  if (precision.stochastic) text.remove_suffix(kStochastic.size());
  const auto number = [](std::string_view digits, auto& value) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return error == std::errc() && end == digits.data() + digits.size();
  };
  const size_t slash = text.find('/');
  if (slash != std::string_view::npos) {
    if (!number(text.substr(slash + 1), precision.block) || precision.block < 1) return {};
    text = text.substr(0, slash);
  }
  for (const Grid& grid : kGrids) {
    if (text != grid.name) continue;
    precision.element = grid.element;
    precision.bits = grid.bits;
    if (!grid.scaled && precision.block > 0) return {};
    if (precision.exact() && precision.stochastic) return {};
    return precision;
  }
  precision.element = Element::kInteger;
  if (!text.starts_with("int") || !number(text.substr(3), precision.bits)) return {};
  if (precision.bits < 4 || precision.bits > 16) return {};
  return precision;
}

std::string precision_name(const Precision& precision) {
  std::string name = grid_of(precision).name;
  if (precision.element == Element::kInteger) name += std::to_string(precision.bits);
  if (precision.block > 0) name += "/" + std::to_string(precision.block);
  return name + (precision.stochastic ? "-sr" : "");
}

void round_row(const Precision& precision, const RowRandom& random, std::span<float> row) {
  if (precision.exact()) return;
  if (!precision.stochastic && precision.element == Element::kBFloat16) {
    for (float& value : row) value = rounded<bf16>(value);
    return;
  }
  const Grid grid = grid_of(precision);
  const auto columns = static_cast<int64_t>(row.size());
  const int64_t block = precision.block > 0 ? precision.block : columns;
  const int64_t groups = (columns + block - 1) / block * ((block + 3) / 4);  // of a row
  for (int64_t begin = 0; begin < columns; begin += block) {
    const int64_t group = random.row * groups + begin / block * ((block + 3) / 4);
    round_block(precision, grid, random, group,
                row.subspan(begin, std::min(block, columns - begin)));
  }
}

void round_stored(const StateEmulation& emulation, const RecurrentStepParams& p, Stored stored,
                  uint32_t stream, ThreadPool& pool) {
  REPLAYSSM_CHECK(p.state.checkpoint_dtype == DType::kFloat32, "checkpoint of type ",
                  dtype_name(p.state.checkpoint_dtype));
  auto* checkpoint = static_cast<float*>(p.state.checkpoint);
  auto* copy = static_cast<float*>(p.state.read_copy.data);
  REPLAYSSM_CHECK(copy == nullptr || p.state.read_copy.dtype == DType::kFloat32,
                  "read copy of type ", dtype_name(p.state.read_copy.dtype));
  const int64_t rows = p.shape.heads * p.shape.head_dim, columns = p.shape.state_dim;
  pool.for_ranges(p.batch.sequences * rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sequence = i / rows, row = i % rows;
      const int32_t slot = p.batch.slot[sequence];
      if (slot < 0) continue;
      const Cursor& cursor = p.batch.cursors[slot];
      const int64_t window = p.batch.query_start[sequence + 1] - p.batch.query_start[sequence];
      const bool all = stored == Stored::kByPrefill || p.route == Route::kConventional;
      if (all ? window == 0 : cursor.fold_count == 0) continue;
      const RowRandom random{.seed = emulation.seed + static_cast<uint64_t>(slot),
                             .position = cursor.ring_start + (all ? window : 0),
                             .stream = stream,
                             .row = row};
      const auto at = [&](float* states) {
        return std::span(states + (slot * rows + row) * columns, static_cast<size_t>(columns));
      };
      if (copy) round_row(emulation.read, random, at(copy));
      round_row(emulation.recurrence, random, at(checkpoint));
    }
  });
}

}  // namespace replayssm::cpu
