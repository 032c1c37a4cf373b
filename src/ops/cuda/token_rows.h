// One launch of a kernel that takes token after token with its rows in registers.
#pragma once

#include <algorithm>

#include "ops/cuda/fast_divide.h"
#include "ops/cuda/padded_rows.h"
#include "replayssm/ops.h"

namespace replayssm::cuda {

// Floats in a block's shared memory, for `chunk` tokens at once.
struct TokenLayout {
  int width = 0;   // of a padded row of keys
  int passes = 1;  // that a warp makes over rows of its own
  int rows = 0;    // of the state that a block owns
  int chunk = 0;
  int keys = 0, queries = 0;  // [chunk, width]
  int decays = 0;             // Kimi Delta: [chunk, width]
  int values = 0, gates = 0;  // [chunk, rows]
  int scalars = 0;            // [chunk, 4]
  int total = 0;
};

inline constexpr int kTokensAtOnce = 16;             // at most in shared memory
inline constexpr int kTokenSharedBytes = 48 * 1024;  // what a block has without asking

// `width`: of a row in registers; `state`: floats for the words of the block's rows.
constexpr TokenLayout token_layout(bool channels, int width, int rows, int state, int most_tokens) {
  TokenLayout s;
  s.width = padded_width(width);
  s.rows = rows;
  const int token = (channels ? 3 : 2) * s.width + 2 * rows + 4;
  const int fits = (kTokenSharedBytes / int(sizeof(float)) - state) / token;
  s.chunk = std::clamp(most_tokens, 1, std::min(fits, kTokensAtOnce));
  s.keys = state;
  s.queries = s.keys + s.chunk * s.width;
  s.decays = s.queries + s.chunk * s.width;
  s.values = s.decays + (channels ? s.chunk * s.width : 0);
  s.gates = s.values + s.chunk * rows;
  s.scalars = s.gates + s.chunk * rows;
  s.total = s.scalars + 4 * s.chunk;
  return s;
}

struct TokenLaunch {
  TokenLayout layout;
  int heads = 0, key_heads = 0, head_dim = 0, state_dim = 0;
  float query_scale = 1;     // of the delta rules' normalised queries
  FastDivide group, slices;  // heads of a key head, blocks of a head

  // Of steps.
  FastDivide ring_rows;                  // by the rows of a slot's ring
  bool folds_all = false;                // no window: the whole ring goes into the checkpoint
  const int32_t* target_slot = nullptr;  // of folds_all; null: in place
};

}  // namespace replayssm::cuda
