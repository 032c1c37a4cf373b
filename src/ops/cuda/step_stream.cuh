// How a warp streams its rows of the states: each lane copies the words that it will itself use
// through its own ring in shared memory.
#pragma once

#include "ops/cuda/step_block.cuh"

namespace replayssm::cuda {

// How lanes share rows: eight a row, as the recurrence needs them; or four, as the tensor cores do.
enum class Access { kReplay, kRows, kTiles };

// What a lane streams at once: a pass of kPassRows rows or one of its kPieces. kRows pieces are
// some of the rows, kTiles pieces some of the columns.
template <class S, int kState, Access kAccess>
struct Group {
  using Map = RowMap<S, kState>;
  static constexpr int kRowWords = kState * int(sizeof(S)) / 16;
  static constexpr int kPassWords = kPassRows * kRowWords / 32;
  static constexpr int kPieces = kAccess == Access::kReplay || kPassWords <= kLaneWords / 2 ? 1 : 2;
  static constexpr int kWords = kPassWords / kPieces;
  static constexpr int kDepth = kLaneWords / kWords;  // groups in flight
  static_assert(kWords > 0 && kDepth > 0);

  static constexpr int kLaneRows = kPassRows / (32 / kRowLanes);  // of a pass, eight lanes a row
  static constexpr int kTileWords = kWords / 2;  // of one of the two rows of a tile
  // Bytes from piece to piece.
  static constexpr int kPieceBytes =
      (kAccess == Access::kTiles ? 1 : kPassRows) * kState * int(sizeof(S)) / kPieces;

  // Bytes from a piece to what this lane takes of it; and to its word i from there.
  __device__ static int lane_offset() {
    const int lane = threadIdx.x % 32;
    if constexpr (kAccess == Access::kTiles) return lane / 4 * kRowWords * 16 + lane % 4 * 16;
    return lane / kRowLanes * kRowWords * 16 + lane % kRowLanes * 16;
  }
  static constexpr int word_offset(int i) {
    if constexpr (kAccess == Access::kTiles)
      return i / kTileWords * (kPassRows / 2 * kRowWords * 16) + i % kTileWords * (4 * 16);
    return i / Map::kChunks * (32 / kRowLanes * kRowWords * 16) +
           i % Map::kChunks * (kRowLanes * 16);
  }
  // Whether word i belongs to the second half of a pass's rows.
  static constexpr bool in_second_half(int i, int piece) {
    if constexpr (kAccess == Access::kTiles) return i >= kTileWords;
    return (piece * kWords + i) * 2 >= kPassWords;
  }
};

// A warp's passes [begin, end) of the block's, fetched group by group.
class WarpStream {
 public:
  // rows: the block's first.
  __device__ WarpStream(const StepLaunch& launch, const char* rows, int row_bytes, char* buffer,
                        int begin, int end)
      : launch_(launch), buffer_(buffer), row_bytes_(row_bytes), left_(end - begin) {
    const int head = launch.passes.divide(begin);
    pass_ = begin - head * launch.head_passes;
    from_ = rows + static_cast<int64_t>(head * launch.head_dim + pass_ * kPassRows) * row_bytes;
  }

  // Fetches the first groups.
  template <class G>
  __device__ void start() {
#pragma unroll
    for (int i = 0; i < G::kDepth; ++i) fetch<G>();
  }
  // The next group's words; fetches one more.
  template <class G>
  __device__ void next(uint4 (&words)[G::kWords]) {
    copy_async_wait_but<G::kDepth - 1>();
    const char* from = buffer_ + slot_ * (G::kWords * 32 * 16);
#pragma unroll
    for (int i = 0; i < G::kWords; ++i)
      words[i] = *reinterpret_cast<const uint4*>(from + i * 32 * 16);
    fetch<G>();
  }

 private:
  // Every call closes a group of copies, whether there is anything left to copy or not.
  template <class G>
  __device__ void fetch() {
    if (left_ > 0) {
      const char* from = from_ + piece_ * G::kPieceBytes + G::lane_offset();
      char* to = buffer_ + slot_ * (G::kWords * 32 * 16);
      const bool half = launch_.slice_rows - pass_ * kPassRows < kPassRows;
#pragma unroll
      for (int i = 0; i < G::kWords; ++i)
        if (!(half && G::in_second_half(i, piece_)))
          copy_async_16(to + i * 32 * 16, from + G::word_offset(i));
      advance<G>();
    }
    copy_async_commit();
    slot_ = slot_ + 1 == G::kDepth ? 0 : slot_ + 1;
  }
  template <class G>
  __device__ void advance() {
    if constexpr (G::kPieces > 1) {
      if (++piece_ < G::kPieces) return;
      piece_ = 0;
    }
    --left_;
    from_ += kPassRows * row_bytes_;
    if (++pass_ < launch_.head_passes) return;
    from_ += (launch_.slice_rows - launch_.head_passes * kPassRows) * row_bytes_;
    pass_ = 0;
  }

  const StepLaunch& launch_;
  char* const buffer_;  // this lane's
  const int row_bytes_;
  const char* from_;
  int left_, pass_, piece_ = 0;  // passes left; the next one's place in its head; the next piece
  int slot_ = 0;
};

}  // namespace replayssm::cuda
