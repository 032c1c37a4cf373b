// How a decode step is cut into blocks, and what a block keeps in shared memory. Pure functions of
// shapes, shared by host and device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cuda/fast_divide.h"
#include "ops/cuda/padded_rows.h"
#include "replay/cursor.h"
#include "replayssm/ops.h"

namespace replayssm::cuda {

// The element types of a step.
struct StepTypes {
  DType activation = DType::kBFloat16;
  DType checkpoint = DType::kFloat32;
  DType read = DType::kFloat32;  // what steps that do not fold read
};

// A block owns some heads of a key group, or a slice of one head's rows, of one sequence.
struct LaunchConfig {
  int heads = 1;        // value heads of a block; more than one only without slices
  int slices = 1;       // pieces that a head's rows are cut into
  int warps = 4;        // at most kMaxWarps
  int preparing = 0;    // warps of a block in a launch before, which does what needs no states; 0:
                        // there is none. Without slices
  bool ahead = false;   // takes states through the ring's rows before it waits for the kernel
                        // before: one head, and at most kPassesAhead passes a warp
  int fold_blocks = 1;  // that share the rows of one where the step folds: a power of two. Neither
                        // with preparing nor ahead

  friend bool operator==(const LaunchConfig&, const LaunchConfig&) = default;
};

inline constexpr int kMaxWarps = 4;

// Most tokens of a window.
inline constexpr int kMaxWindow = 16;

// Rows of a state that a warp takes at once: a pass.
inline constexpr int kPassRows = 8;

// Channels that a thread of a fused step convolves at once, and the taps of its convolution.
inline constexpr int kConvUnit = 4, kFusedTaps = 4;

// Words of 16 bytes that a lane has in flight: so many groups of so many.
inline constexpr int kGroupWords = 8, kGroupsInFlight = 2;

// Most passes of a warp whose states, as floats, lie where its words in flight would.
inline constexpr int kPassesAhead = kGroupsInFlight;

// 16-bit parts of a number that is an operand of the tensor cores: they keep its 24 bits.
inline constexpr int kParts = 3;

// Most rows of ring and window for which the Gram form is solved: a lane each.
inline constexpr int kMostGramRows = 32;

// Most rows that the tensor cores fold.
inline constexpr int kMostTileRows = 16;

// Activations that the tensor cores take as they are. All others pass through the general path.
constexpr bool are_operands(DType activation) { return activation == DType::kBFloat16; }

// Steps that a launch before the step kernel may prepare, where the ring has no more rows. Gated
// Delta's were no faster.
inline constexpr int kMostPreparedRows = 16;
constexpr bool can_prepare(Family family, DType activation, bool many) {
  return family != Family::kGatedDelta && are_operands(activation) && !many;
}

// What a block remembers of where it stands.
inline constexpr int kPlaceBytes = 128;

// Elements from one row of keys, or values, in shared memory to the next: rows of eight lanes meet
// no bank twice.
constexpr int row_stride(int columns, int element_bytes) { return columns + 16 / element_bytes; }

// Parts of a vector that meets states of type `read`: Mamba-2's queries may be operands themselves.
constexpr int target_parts(Family family, DType activation, DType read) {
  return family == Family::kMamba2 && are_operands(activation) && read == activation ? 1 : kParts;
}

// Bytes of a vector that meets fp32 states on the tensor cores.
constexpr int halves_stride(int state_dim) { return 8 * state_dim + 16; }

// What a block keeps in shared memory: offsets in bytes. Rows are those of ring and window. The
// sizes are what the launch allows; a sequence may use less.
struct StepLayout {
  int rows = 0;
  int window = 0;          // tokens
  int tokens = 0;          // those of all its heads
  int aside_rows = 0;      // most rows that are folded aside; 0: none
  int columns = 0;         // rows of the state that the block owns, over all its heads
  int product_stride = 0;  // floats from the products of one row, or query, to the next
  int weight_stride = 0;   // operands from the weights of one token to the next
  int step_stride = 0;     // the same of steps

  int stream = 0;  // [warps] words that lanes have in flight
  int place = 0;   // BlockPlace
  int keys = 0;    // [rows], then queries [window], as they came, row_stride apart
  int values = 0;  // [rows, columns], as they came, row_stride apart
  int zeros = 0;   // 16 bytes: what operands are read from where there is no row
  // Floats from here on, except for operands.
  int strengths = 0;       // [heads, rows]
  int log_decays = 0;      // [heads, rows] (not Kimi Delta)
  int decays = 0;          // [heads, rows]; Kimi Delta: [heads, rows] padded rows
  int factors = 0;         // delta: 1 / |k|, [rows]
  int products = 0;        // of all rows with the queries, [window]; Gram form: with rows before
  int weights = 0;         // what rows add to outputs: operands, [kParts, heads, window, rows];
                           // general path: floats, [heads, window, rows]
  int steps = 0;           // Gram form: targets are sums of keys and queries with these factors:
                           // operands, [kParts, heads, window, rows and queries]
  int row_scales = 0;      // of an 8-bit read copy: [columns]
  int fold_terms = 0;      // folding on the tensor cores: [heads]
  int fold_matrices = 0;   // the delta rule's, [heads]
  int fold_rows = 0;       // what a fold hands from lane to lane, [warps]
  int fold_row_bytes = 0;  // of a warp

  // What preparation hands to those that read states: from `handed` on, or in a workspace.
  int handed = 0;
  int outputs = 0;        // [window, columns], as far as rows of ring and window give them
  int part_scales = 0;    // [heads, window]
  int output_scales = 0;  // [heads, window]
  int targets = 0;        // [heads, window] padded rows, or operands; Mamba-2's heads share theirs,
                          // the queries
  int handed_bytes = 0;
  int total = 0;
};

// What a fold on the tensor cores needs to know about a head (step_fold.cuh). Rows that there are
// not have zeros.
struct FoldTerms {
  float write[kMostTileRows];   // strength, times 1 / |k|
  float behind[kMostTileRows];  // the decay of all rows behind this one
  float total;                  // the decay of all rows
};
// The delta rule's besides.
struct FoldMatrix {
  float matrix[kMostTileRows][kMostTileRows];  // k_m . k_j and the decays between, at [m][j]
  float known[kMostTileRows];                  // 1 / |k|
  float before[kMostTileRows];                 // the decay of this row and all before it
};

// Bytes that a warp hands from lane to lane for it: 16 rows of numbers, or of operands in two
// parts.
inline constexpr int kFoldRowBytes = 4 * 16 * kMostTileRows;

// The same of a row of the ring that windows of several tokens replay: a number for each of 16 rows
// of the state.
inline constexpr int kReplayRowBytes = 4 * 16;

// Whether steps of these types fold on the tensor cores, up to kMostTileRows rows.
constexpr bool folds_in_tiles(Family family, DType activation, DType checkpoint, bool has_copy) {
  if (!are_operands(activation) || dtype_bytes(checkpoint) != 2 || has_copy) return false;
  return family == Family::kMamba2 || (family == Family::kGatedDelta && checkpoint == activation);
}

// Whether fp32 states are folded aside in windows of several tokens. The delta rule's folds leave
// no registers for it, and their rows' weights are more to form.
constexpr bool folds_rows_aside(Family family, DType checkpoint, bool has_copy, bool many) {
  return many && checkpoint == DType::kFloat32 && !has_copy && family == Family::kMamba2;
}

// Whether steps may run ahead. With one token those that fold on the tensor cores then do not;
// windows of several have a kernel of their own, which all steps take.
constexpr bool can_run_ahead(Family family, DType activation, DType checkpoint, bool has_copy,
                             bool many) {
  return are_operands(activation) &&
         !(many && folds_in_tiles(family, activation, checkpoint, has_copy));
}

// The Gram form in place of a walk.
constexpr bool uses_gram(Family family, DType activation, int rows) {
  return family == Family::kGatedDelta && are_operands(activation) && rows <= kMostGramRows;
}

// Bytes of a target as operands of the tensor cores.
constexpr int part_bytes(Family family, const StepTypes& types, int state_dim, int window) {
  if (types.read == DType::kFloat32) return window > 1 ? halves_stride(state_dim) : 0;
  return target_parts(family, types.activation, types.read) * row_stride(state_dim, 2) * 2;
}

constexpr StepLayout step_layout(const RecurrentShape& shape, const RingConfig& ring,
                                 const StepTypes& types, const LaunchConfig& config) {
  StepLayout s;
  const auto take = [&](int bytes) {
    const int at = s.total;
    s.total += round_up(bytes, 16);
    return at;
  };
  const bool mamba = shape.family == Family::kMamba2, kimi = shape.family == Family::kKimiDelta;
  const bool operands = are_operands(types.activation);
  const int state = static_cast<int>(shape.state_dim);
  const int act = static_cast<int>(dtype_bytes(types.activation));
  s.rows = static_cast<int>(ring_rows(ring.buffer_len, ring.max_window));
  s.window = ring.max_window;
  s.tokens = config.heads * s.window;
  s.columns = static_cast<int>(shape.head_dim) * config.heads / config.slices;
  s.product_stride = round_up(s.rows - 4, 16) + 4;  // eight lanes by four meet no bank twice
  s.weight_stride = round_up(s.rows, 16) + 8;
  s.step_stride = round_up(s.rows + s.window, 16) + 8;
  const bool gram = uses_gram(shape.family, types.activation, s.rows);
  const int gates = 4 * config.heads * s.rows, targets = mamba ? s.window : s.tokens;
  s.stream = take(config.warps * 32 * kGroupsInFlight * kGroupWords * 16);
  s.place = take(kPlaceBytes);
  s.keys = take((s.rows + s.window) * row_stride(state, act) * act);
  s.values = take(s.rows * row_stride(s.columns, act) * act);
  s.zeros = take(16);
  s.strengths = take(gates);
  if (!kimi) s.log_decays = take(gates);
  s.decays = take(kimi ? gates * padded_width(state) : gates);
  if (!mamba) s.factors = take(4 * s.rows);
  const bool has_copy = types.read != types.checkpoint, many = s.window > 1;
  const bool folds =
      (mamba || gram) && folds_in_tiles(shape.family, types.activation, types.checkpoint, has_copy);
  s.aside_rows = folds                                                              ? kMostTileRows
                 : folds_rows_aside(shape.family, types.checkpoint, has_copy, many) ? s.rows
                                                                                    : 0;
  if (folds) {
    s.fold_terms = take(config.heads * static_cast<int>(sizeof(FoldTerms)));
    if (!mamba) s.fold_matrices = take(config.heads * static_cast<int>(sizeof(FoldMatrix)));
  }
  s.weights = take(s.tokens * s.weight_stride * (operands ? 2 * kParts : 4));
  if (dtype_bytes(types.read) == 1) s.row_scales = take(4 * s.columns);

  const int early = s.total;
  s.total = 0;
  s.outputs = take(4 * s.window * s.columns);
  const int output_bytes = s.total;
  s.part_scales = take(4 * targets);
  s.output_scales = take(4 * s.tokens);
  s.targets = take(std::max(4 * targets * padded_width(state),
                            targets * part_bytes(shape.family, types, state, s.window)));
  s.handed_bytes = s.total;
  // What is dead when outputs are formed lies where these and what folds hand over do.
  s.total = early;
  if (mamba || gram) s.products = take(4 * (s.window + (gram ? s.rows : 0)) * s.product_stride);
  if (gram) s.steps = take(s.tokens * s.step_stride * 2 * kParts);
  const int early_end = s.total;
  s.total = early;
  s.fold_row_bytes = std::max(folds ? kFoldRowBytes : 0, many ? s.rows * kReplayRowBytes : 0);
  s.fold_rows = take(config.warps * s.fold_row_bytes);
  s.handed = std::max(s.total, early_end - output_bytes);
  s.total = s.handed + s.handed_bytes;
  return s;
}

}  // namespace replayssm::cuda
