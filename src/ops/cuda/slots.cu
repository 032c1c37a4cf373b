// Slots as memory: cleared, copied, compacted.
//
// Grid: (pieces of kPiece bytes of all arrays, sequences). A thread moves words of up to 16 bytes;
// compaction takes the rows of a path in order, each thread its own columns of all of them.

#include "ops/cuda/slots.h"

#include <algorithm>

#include "ops/check_params.h"
#include "ops/cuda/dependent_launch.cuh"
#include "replay/layout.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 256, kBatch = 4, kPiece = kThreads * kBatch * 16;

// The arrays that an op touches, cut into pieces.
struct Pieces {
  struct Array {
    LayerArray array;
    int word = 1;       // bytes that every row is a multiple of
    int64_t bytes = 0;  // that are cut: a slot, or a row
    int end = 0;        // pieces of this array and those before it
  };
  Array arrays[9];
  int count = 0;
};

// Bytes of the largest word that memory at `data` and multiples of `bytes` behind it consist of.
int word_bytes(const void* data, int64_t bytes) {
  int word = 16;
  while ((reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(bytes)) % word != 0) word /= 2;
  return word;
}

// `rows`: rows are cut, and of the arrays only those that have a row per token.
template <class Params>
Pieces pieces_of(const Params& p, bool rings, bool states, bool rows) {
  Pieces pieces;
  int end = 0;
  for (const LayerArray& array :
       layer_arrays(p.shape, p.batch.ring, p.state, p.conv_inputs, p.channels)) {
    using Kind = LayerArray::Kind;
    if (array.data == nullptr || (array.kind == Kind::kRing && !rings) ||
        (array.kind == Kind::kState && !states))
      continue;
    auto& piece = pieces.arrays[pieces.count++];
    piece.array = array;
    piece.word = word_bytes(array.data, array.row_bytes);
    piece.bytes = rows ? array.row_bytes : array.slot_bytes();
    end += static_cast<int>((piece.bytes + kPiece - 1) / kPiece);
    piece.end = end;
  }
  return pieces;
}

dim3 grid_of(const Pieces& pieces, int64_t sequences) {
  return dim3(static_cast<unsigned>(pieces.arrays[pieces.count - 1].end),
              static_cast<unsigned>(sequences));
}

// Where this thread's words lie in its block's array.
struct Share {
  const LayerArray& array;
  int word;
  int64_t first, stop;  // bytes [first, stop), this thread's words kThreads words apart
};
__device__ inline Share share_of(const Pieces& pieces) {
  int i = 0, before = 0;
  while (static_cast<int>(blockIdx.x) >= pieces.arrays[i].end) before = pieces.arrays[i++].end;
  const auto& piece = pieces.arrays[i];
  const int64_t first = int64_t{static_cast<int>(blockIdx.x) - before} * kPiece;
  return {piece.array, piece.word, first + int64_t{threadIdx.x} * piece.word,
          min(first + kPiece, piece.bytes)};
}

__device__ inline char* row_of(const LayerArray& array, int64_t slot, int64_t counter) {
  return static_cast<char*>(array.data) + array.offset(slot, counter);
}

template <class Fn>
__device__ inline void dispatch_word(int word, Fn&& fn) {
  switch (word) {
    case 16: return fn(uint4());
    case 8: return fn(uint2());
    case 4: return fn(uint32_t());
    case 2: return fn(uint16_t());
    default: return fn(uint8_t());
  }
}

// to[at] = from[at] for this thread's words; null: zeros.
template <class W>
__device__ inline void move_words(const char* from, char* to, const Share& share) {
  constexpr int kStep = kThreads * sizeof(W);
#pragma unroll 1
  for (int64_t at = share.first; at < share.stop; at += kBatch * kStep) {
    W words[kBatch] = {};
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (from && at + u * kStep < share.stop)
        words[u] = *reinterpret_cast<const W*>(from + at + u * kStep);
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (at + u * kStep < share.stop) *reinterpret_cast<W*>(to + at + u * kStep) = words[u];
  }
}

__global__ void __launch_bounds__(kThreads)
    slot_move_kernel(const __grid_constant__ Pieces pieces, const int32_t* source,
                     const int32_t* target) {
  wait_for_predecessor();
  const int64_t from = source ? source[blockIdx.y] : 0, to = target[blockIdx.y];
  if (from < 0 || to < 0) return;
  const Share share = share_of(pieces);
  dispatch_word(share.word, [&]<class W>(W) {
    move_words<W>(source ? row_of(share.array, from, 0) : nullptr, row_of(share.array, to, 0),
                  share);
  });
  __threadfence();  // the next kernel may read it as soon as this block is gone
}

// Sources lie behind their targets, so that a few rows may be read before the first is written.
template <class W>
__device__ inline void move_path(const Share& share, const int32_t* path, int accepted,
                                 int64_t slot, int64_t first) {
#pragma unroll 1
  for (int64_t at = share.first; at < share.stop; at += kThreads * sizeof(W)) {
#pragma unroll 1
    for (int i = 0; i < accepted; i += kBatch) {
      W words[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u)
        if (i + u < accepted && path[i + u] != i + u)
          words[u] =
              *reinterpret_cast<const W*>(row_of(share.array, slot, first + path[i + u]) + at);
#pragma unroll
      for (int u = 0; u < kBatch; ++u)
        if (i + u < accepted && path[i + u] != i + u)
          *reinterpret_cast<W*>(row_of(share.array, slot, first + i + u) + at) = words[u];
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    compact_kernel(const __grid_constant__ Pieces pieces, SequenceBatch batch, const int32_t* path,
                   const int32_t* accepted) {
  release_successor();
  wait_for_predecessor();
  const int64_t slot = batch.slot[blockIdx.y];
  if (slot < 0) return;
  path += batch.query_start[blockIdx.y];
  const int count = accepted[blockIdx.y];
  // Paths ascend: where the last row stays, all do.
  if (count == 0 || path[count - 1] == count - 1) return;
  const int64_t first = batch.cursors[slot].ring_start + batch.cursors[slot].ring_count;
  const Share share = share_of(pieces);
  dispatch_word(share.word, [&]<class W>(W) { move_path<W>(share, path, count, slot, first); });
}

}  // namespace

void slot_clear(const SlotClearParams& p, cudaStream_t stream) {
  check_params(p);
  check_grid_sequences(p.batch.sequences);
  if (p.batch.sequences == 0) return;
  const Pieces pieces = pieces_of(p, false, true, false);
  launch_dependent("slot_clear", slot_move_kernel, grid_of(pieces, p.batch.sequences), kThreads, 0,
                   stream, pieces, nullptr, p.batch.slot);
}

void slot_copy(const SlotCopyParams& p, cudaStream_t stream) {
  check_params(p);
  check_grid_sequences(p.batch.sequences);
  if (p.batch.sequences == 0) return;
  const Pieces pieces = pieces_of(p, true, true, false);
  launch_dependent("slot_copy", slot_move_kernel, grid_of(pieces, p.batch.sequences), kThreads, 0,
                   stream, pieces, p.batch.slot, p.target_slot);
}

void compact(const CompactParams& p, cudaStream_t stream) {
  check_params(p);
  check_grid_sequences(p.batch.sequences);
  const Pieces pieces = pieces_of(p, true, false, true);
  if (p.batch.sequences == 0 || pieces.count == 0) return;
  launch_dependent("compact", compact_kernel, grid_of(pieces, p.batch.sequences), kThreads, 0,
                   stream, pieces, p.batch, p.path, p.accepted);
}

}  // namespace replayssm::cuda
