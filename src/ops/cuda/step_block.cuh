// What a block of a decode step needs before it can read states: where it stands, and its shared
// memory.
#pragma once

#include "ops/cuda/async_copy.cuh"
#include "ops/cuda/elements.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/sequence_plan.cuh"
#include "ops/cuda/step_launch.h"

namespace replayssm::cuda {

// Where a block stands.
struct BlockPlace {
  int head, row;  // its first head, and the first of its rows within that head
  int key_head;
  int part;                                // of those blocks that share a fold
  bool leads_key;                          // the first of its key head's
  bool owns_values, owns_key, owns_gates;  // it appends the window's values, keys, its gates
  int slot, target, token, window;
  int64_t ring_row;   // the slot's first physical row
  int ring_first;     // row 0, counted from there
  int history, rows;  // ring rows; with the window
  int conv_first;     // where the window's first input goes among the slot's, of a fused step
  bool copies;        // goes to another slot even where there is nothing to fold
  int stored;         // the first rows: their effect goes into the checkpoint
  int replayed;       // the first rows: the recurrence runs over them
  int aside;          // the first rows: they go into the checkpoint while outputs are read off the
                      // state as it was; else 0
  bool reads_after;   // a token's output is read off the state behind it; else all outputs are read
                      // off the state behind `replayed`, and the rows from there on are mixed in

  // Rows before this one are not mixed in.
  __device__ int first_mixed() const { return reads_after ? rows : replayed; }
  // Where row j lies among the slot's physical rows.
  __device__ int physical(int j, int ring_rows) const {
    const int at = ring_first + j;
    return at < ring_rows ? at : at - ring_rows;
  }
};

static_assert(sizeof(BlockPlace) <= kPlaceBytes);

// Past the first-level cache: the kernel that moved the cursor may have ended just now.
__device__ inline Cursor current_cursor(const Cursor* cursor) {
  Cursor c;
  c.ring_start = __ldcg(&cursor->ring_start);
  c.ring_count = __ldcg(&cursor->ring_count);
  c.fold_count = __ldcg(&cursor->fold_count);
  return c;
}

// Of the sequence that this block takes.
__device__ inline SequencePlan sequence_plan(const RecurrentStepParams& p,
                                             const StepLaunch& launch) {
  if (p.batch.plan) return planned_sequence(p.batch, blockIdx.y);
  const int s = static_cast<int>(blockIdx.y);
  SequencePlan plan{.sequence = s, .slot = p.batch.slot[s]};
  if (!launch.fold_all) {
    plan.token = p.batch.query_start[s];
    plan.window = p.batch.query_start[s + 1] - plan.token;
  }
  if (plan.slot < 0) return plan;
  const Cursor cursor = current_cursor(p.batch.cursors + plan.slot);
  const int64_t next = cursor.ring_start + cursor.ring_count;
  plan.ring_first =
      static_cast<int>(launch.ring_rows.modulo64(cursor.ring_start - cursor.fold_count));
  plan.history = cursor.fold_count + cursor.ring_count;
  plan.folded = cursor.fold_count;
  if (launch.conv.x) plan.conv_first = static_cast<int>(launch.conv_rows.modulo64(next));
  return plan;
}

// Reads what the kernel before may not write: see wait_for_predecessor.
__device__ inline BlockPlace block_place(const RecurrentStepParams& p, const StepLaunch& launch) {
  BlockPlace b{};
  const auto& config = launch.config;
  const SequencePlan plan = sequence_plan(p, launch);
  const int group = blockIdx.x / static_cast<unsigned>(config.fold_blocks);
  b.part = blockIdx.x - group * config.fold_blocks;
  b.head = group * config.heads;
  b.row = blockIdx.z * launch.slice_rows;
  b.key_head = launch.group.divide(b.head);
  b.slot = plan.slot;
  b.token = plan.token;
  // Whatever the numbers say, shared memory has room for so many rows.
  b.window = min(plan.window, launch.layout.window);
  b.target = launch.target_slot ? launch.target_slot[plan.sequence] : b.slot;
  const bool keeps = !launch.fold_all && p.route != Route::kConventional;
  const bool first = blockIdx.z == 0 && b.part == 0;
  b.leads_key = first && b.key_head * static_cast<int>(launch.group.divisor) == b.head;
  b.owns_values = keeps && b.part == 0;
  b.owns_gates = keeps && first;
  b.owns_key = keeps && b.leads_key;
  if (b.slot < 0) return b;
  b.copies = launch.fold_all && b.target != b.slot && b.target >= 0;
  b.ring_row = static_cast<int64_t>(b.slot) * launch.layout.rows;
  b.ring_first = plan.ring_first;
  b.history = min(max(plan.history, 0), launch.layout.rows - b.window);
  b.rows = b.history + b.window;
  b.conv_first = plan.conv_first;
  const bool conventional = p.route == Route::kConventional;
  b.reads_after = conventional || (p.route == Route::kStateAndOutput && !p.batch.parent);
  b.stored = launch.fold_all ? b.history : conventional ? b.rows : min(plan.folded, b.history);
  b.replayed = b.reads_after ? b.rows : p.route == Route::kStateAndOutput ? b.history : b.stored;
  if (p.route == Route::kOutputOnly && b.stored <= launch.layout.aside_rows) {
    b.aside = b.stored;
    b.replayed = 0;
  }
  return b;
}

// What is handed over of this block.
__device__ inline char* handed_block(const StepLaunch& launch) {
  return launch.handed +
         (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * launch.layout.handed_bytes;
}

// Whether a launch before the step kernel prepares this block: its sequence does not fold.
__device__ inline bool is_prepared(const StepLaunch& launch, const BlockPlace& b) {
  return launch.handed && b.stored == 0;
}

// A block's shared memory. Rows are those of ring and window, oldest first; heads count from the
// block's first.
template <Family kFamily, class Act, int kState>
class BlockShared {
 public:
  static constexpr int kPerLane = kState / kRowLanes;
  static constexpr int kPadded = padded_width(kState);
  static constexpr int kKeyStride = row_stride(kState, sizeof(Act));
  static constexpr int kPartStride = row_stride(kState, 2);

  // handed: where what preparation hands over lies.
  __device__ BlockShared(const StepLayout& layout, char* memory, char* handed)
      : layout_(layout), memory_(memory), handed_(handed) {}

  __device__ BlockPlace& place() const {
    return *reinterpret_cast<BlockPlace*>(memory_ + layout_.place);
  }
  __device__ Act* key(int j) const {
    return reinterpret_cast<Act*>(memory_ + layout_.keys) + j * kKeyStride;
  }
  __device__ Act* query(int i) const { return key(layout_.rows + i); }
  __device__ int value_stride() const { return row_stride(layout_.columns, sizeof(Act)); }
  __device__ Act* value(int j) const {
    return reinterpret_cast<Act*>(memory_ + layout_.values) + j * value_stride();
  }
  // 16 bytes.
  __device__ void* zeros() const { return memory_ + layout_.zeros; }
  __device__ float* strengths(int head) const { return gates(layout_.strengths, head); }
  // Scalar decays and their logarithms.
  __device__ float* decays(int head) const { return gates(layout_.decays, head); }
  __device__ float* log_decays(int head) const { return gates(layout_.log_decays, head); }
  // Kimi Delta's: a padded row.
  __device__ float* channel_decays(int head, int j) const {
    return floats(layout_.decays) + (head * layout_.rows + j) * kPadded;
  }
  // As they came, until there are decays in their place.
  __device__ Act* raw_gates(int head, int j) const {
    return reinterpret_cast<Act*>(channel_decays(head, j) + kPadded) - kState;
  }
  // The delta rule: what makes a raw key one of length 1.
  __device__ float* key_factors() const { return floats(layout_.factors); }
  // Of query i with all rows; the Gram form's of row m with rows before it.
  __device__ float* query_products(int i) const {
    return floats(layout_.products) + i * layout_.product_stride;
  }
  __device__ float* row_products(int m) const { return query_products(layout_.window + m); }
  __device__ int token_index(int head, int i) const { return head * layout_.window + i; }
  // What the values of all rows add to the output of token i: operands, a part of them; floats.
  __device__ Bf16* weights(int part, int head, int i) const {
    return operands(layout_.weights, part, token_index(head, i), layout_.weight_stride);
  }
  __device__ float* plain_weights(int head, int i) const {
    return floats(layout_.weights) + token_index(head, i) * layout_.weight_stride;
  }
  // The target of token i is the sum of all keys, then queries, with these factors.
  __device__ Bf16* steps(int part, int head, int i) const {
    return operands(layout_.steps, part, token_index(head, i), layout_.step_stride);
  }
  // The vector of token i that meets the state of a head.
  __device__ int target_index(int head, int i) const {
    return (kFamily == Family::kMamba2 ? 0 : head * layout_.window) + i;
  }
  __device__ float* target(int head, int i) const {
    return handed(layout_.targets) + target_index(head, i) * kPadded;
  }
  // As operands, so many bytes, and what their products are scaled by.
  __device__ void* parts(int head, int i, int bytes) const {
    return handed_ + layout_.targets + target_index(head, i) * bytes;
  }
  __device__ float& part_scale(int head, int i) const {
    return handed(layout_.part_scales)[target_index(head, i)];
  }
  // What the product of state and target is scaled by.
  __device__ float& output_scale(int head, int i) const {
    return handed(layout_.output_scales)[token_index(head, i)];
  }
  __device__ float* row_scales() const { return floats(layout_.row_scales); }
  __device__ float* outputs(int i) const { return handed(layout_.outputs) + i * layout_.columns; }
  __device__ char* handed() const { return handed_; }
  __device__ FoldTerms& fold_terms(int head) const {
    return reinterpret_cast<FoldTerms*>(memory_ + layout_.fold_terms)[head];
  }
  __device__ FoldMatrix& fold_matrix(int head) const {
    return reinterpret_cast<FoldMatrix*>(memory_ + layout_.fold_matrices)[head];
  }
  // This warp's.
  __device__ char* fold_rows() const {
    return memory_ + layout_.fold_rows + threadIdx.x / 32 * layout_.fold_row_bytes;
  }
  // A warp's words in flight.
  __device__ char* stream() const {
    return memory_ + layout_.stream + threadIdx.x / 32 * (32 * kGroupsInFlight * kGroupWords * 16);
  }

  // A lane's share of a row of keys or queries, as states of S lie in eight lanes.
  template <class S>
  __device__ static void load_key(const Act* row, int lane, float (&x)[kPerLane]) {
    using Map = RowMap<S, kState>;
    constexpr int kMost = 16 / sizeof(Act), kRun = Map::kElems < kMost ? Map::kElems : kMost;
#pragma unroll
    for (int c = 0; c < Map::kChunks; ++c)
#pragma unroll
      for (int e = 0; e < Map::kElems; e += kRun)
        load_elements<Act, kRun>(row + Map::element(c, lane) + e, x + c * Map::kElems + e);
  }

 private:
  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(memory_ + offset); }
  __device__ float* handed(int offset) const { return reinterpret_cast<float*>(handed_ + offset); }
  __device__ float* gates(int offset, int head) const {
    return floats(offset) + head * layout_.rows;
  }
  __device__ Bf16* operands(int offset, int part, int token, int stride) const {
    return reinterpret_cast<Bf16*>(memory_ + offset) + (part * layout_.tokens + token) * stride;
  }

  const StepLayout& layout_;
  char *const memory_, *const handed_;
};

}  // namespace replayssm::cuda
