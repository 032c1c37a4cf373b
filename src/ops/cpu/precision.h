// Emulation of storage formats: what a state would be if it were kept in a format that no kernel
// stores. Rows stay fp32 in memory and hold only values of the format.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/thread_pool.h"
#include "replayssm/ops.h"

namespace replayssm::cpu {

// A format of numbers and how it is applied to a state row. Formats of at most 8 bits and integers
// are scaled: every block of columns has an fp32 scale, max |block| / largest; the others are not.
struct Precision {
  enum class Element : uint8_t {
    kFloat32,
    kFloat16,
    kBFloat16,
    kFloat8E4M3,
    kFloat4E2M1,
    kInteger,  // symmetric: -(2^(bits-1) - 1) .. 2^(bits-1) - 1
  };
  Element element = Element::kFloat32;
  int bits = 32;
  int64_t block = 0;        // columns that share a scale; 0: the whole row
  bool stochastic = false;  // else to nearest, ties to even

  bool exact() const { return element == Element::kFloat32; }
};

// FORMAT[/BLOCK][-sr], FORMAT one of float32, float16, bfloat16, e4m3, e2m1, int4 .. int16; BLOCK a
// number of columns; -sr: stochastic. None where the text is none of these.
std::optional<Precision> parse_precision(std::string_view text);
std::string precision_name(const Precision& precision);

// The random numbers of a row: philox4x32_10 under `seed` at (position, stream, group of four
// columns counted through the rows of a slot).
struct RowRandom {
  uint64_t seed = 0;
  int64_t position = 0;
  uint32_t stream = 0;
  int64_t row = 0;
};

// Rounds a row in place.
void round_row(const Precision& precision, const RowRandom& random, std::span<float> row);

// What a model emulates: checkpoints are float32 and are rounded to `recurrence`, float32 read
// copies to `read`.
struct StateEmulation {
  Precision recurrence, read;
  uint64_t seed = 0;
};

// Rounds what a call has just stored: behind a step the states of the sequences that folded (or, on
// the conventional route, had tokens), behind a prefill those of all that had tokens. Both copies
// are rounded from the same exact values.
enum class Stored : uint8_t { kByStep, kByPrefill };
void round_stored(const StateEmulation& emulation, const RecurrentStepParams& params, Stored stored,
                  uint32_t stream, ThreadPool& pool);

}  // namespace replayssm::cpu
