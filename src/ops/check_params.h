// Argument checks of the ops, shared by every backend.
//
// Each throws Error before anything is written; the message names the argument, what was expected
// and what was given: "state.ring_v: expected 16-byte alignment, got address 0x7f12a4 of 4-byte
// alignment".
#pragma once

#include <cstdint>

#include "replayssm/ops.h"

namespace replayssm {

// The cheap checks: shapes, types, pointers, strides and alignments. Nothing behind a pointer is
// read. `alignment` is what the backend's loads need of pointers and of rows of activations, in
// bytes; at the least an element's own.
void check_params(const RecurrentShape& shape, const RingConfig& ring);
void check_params(const RecurrentStepParams& params, int64_t alignment = 1);
void check_params(const RecurrentPrefillParams& params, int64_t alignment = 1);
void check_params(const SnapshotStepParams& params, int64_t alignment = 1);
void check_params(const RecurrentFoldParams& params, int64_t alignment = 1);
void check_params(const ConvParams& params, int64_t alignment = 1);
void check_params(const LayerStepParams& params, int64_t alignment = 1);
void check_params(const SlotClearParams& params, int64_t alignment = 1);
void check_params(const SlotCopyParams& params, int64_t alignment = 1);
void check_params(const CompactParams& params, int64_t alignment = 1);

// One pointer: null, or not aligned to `alignment` bytes.
void check_pointer(const char* name, const void* pointer, int64_t alignment);

// What windows an op takes.
enum class WindowUse : uint8_t {
  kDecode,  // at most max_window tokens, in a step that has begun
  kPrompt,  // of any length, on an empty ring
  kAny,     // of any length
  kNone,    // query_start and parent are not read
};

// Of host arrays, cheap: windows ascend and fit the ring, parents come before their token.
void check_windows(const SequenceBatch& batch, WindowUse use);

// Of host arrays, for debugging: check_windows, slots out of range or twice in a batch, cursors out
// of range. `slots` is how many the pool has.
void check_batch(const SequenceBatch& batch, int64_t slots, WindowUse use);

// check_batch in builds that look for errors (Debug, sanitizers), for a pool of unknown size.
void debug_check(const SequenceBatch& batch, WindowUse use);

// The same for target_slot: within the pool, none twice, none among the batch's sources.
void check_targets(const SequenceBatch& batch, const int32_t* target_slot, int64_t slots);

// The same for an accepted path: ascending, within its window, as many as accepted.
void check_path(const SequenceBatch& batch, const int32_t* path, const int32_t* accepted);

}  // namespace replayssm
