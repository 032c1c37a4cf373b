// Slots as memory: cleared, copied, compacted.

#include "ops/cpu/slots.h"

#include <algorithm>
#include <cstring>

#include "ops/check_params.h"
#include "replay/layout.h"

namespace replayssm::cpu {
namespace {

using Arrays = std::array<LayerArray, 9>;

template <class Params>
Arrays arrays_of(const Params& p) {
  return layer_arrays(p.shape, p.batch.ring, p.state, p.conv_inputs, p.channels);
}

// Calls fn(array, offset, bytes, sequence) for pieces that together make up the slots, spread over
// the pool whatever the number of slots.
template <class Fn>
void for_pieces(const Arrays& arrays, int64_t sequences, ThreadPool& pool, Fn&& fn) {
  constexpr int64_t kPiece = 1 << 16;  // bytes: some microseconds
  int64_t pieces = 0;
  for (const LayerArray& array : arrays) pieces += (array.slot_bytes() + kPiece - 1) / kPiece;
  pool.for_ranges(sequences * pieces, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t piece = i % pieces;
      for (const LayerArray& array : arrays) {
        const int64_t count = (array.slot_bytes() + kPiece - 1) / kPiece;
        if (piece < count) {
          const int64_t offset = piece * kPiece;
          if (array.data != nullptr)
            fn(array, offset, std::min(kPiece, array.slot_bytes() - offset), i / pieces);
          break;
        }
        piece -= count;
      }
    }
  });
}

}  // namespace

void slot_clear(const SlotClearParams& p, ThreadPool& pool) {
  check_params(p);
  debug_check(p.batch, WindowUse::kNone);
  const Arrays arrays = arrays_of(p);
  for_pieces(arrays, p.batch.sequences, pool,
             [&](const LayerArray& array, int64_t offset, int64_t bytes, int64_t s) {
               const int64_t slot = p.batch.slot[s];
               if (slot < 0 || array.kind == LayerArray::Kind::kRing) return;
               std::memset(array.row(slot, 0) + offset, 0, static_cast<size_t>(bytes));
             });
}

void slot_copy(const SlotCopyParams& p, ThreadPool& pool) {
  check_params(p);
  debug_check(p.batch, WindowUse::kNone);
  const Arrays arrays = arrays_of(p);
  for_pieces(arrays, p.batch.sequences, pool,
             [&](const LayerArray& array, int64_t offset, int64_t bytes, int64_t s) {
               const int64_t from = p.batch.slot[s], to = p.target_slot[s];
               if (from < 0 || to < 0) return;
               std::memcpy(array.row(to, 0) + offset, array.row(from, 0) + offset,
                           static_cast<size_t>(bytes));
             });
}

void compact(const CompactParams& p, ThreadPool& pool) {
  check_params(p);
  if (p.batch.sequences > 0) check_path(p.batch, p.path, p.accepted);
  debug_check(p.batch, WindowUse::kDecode);
  const Arrays arrays = arrays_of(p);
  pool.for_ranges(p.batch.sequences, [&](int64_t begin, int64_t end, int) {
    for (int64_t s = begin; s < end; ++s) {
      const int64_t slot = p.batch.slot[s];
      if (slot < 0) continue;
      const Cursor& cursor = p.batch.cursors[slot];
      const int64_t first = cursor.ring_start + cursor.ring_count;
      const int32_t* path = p.path + p.batch.query_start[s];
      for (int64_t i = 0; i < p.accepted[s]; ++i) {
        if (path[i] == i) continue;
        for (const LayerArray& array : arrays) {
          if (array.data == nullptr || array.kind == LayerArray::Kind::kState) continue;
          std::memcpy(array.row(slot, first + i), array.row(slot, first + path[i]),
                      static_cast<size_t>(array.row_bytes));
        }
      }
    }
  });
}

}  // namespace replayssm::cpu
