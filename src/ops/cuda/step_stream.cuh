// How a warp streams its rows of the states through a ring of its own in shared memory.
#pragma once

#include "ops/cuda/step_block.cuh"

namespace replayssm::cuda {

// How lanes share rows: eight a row, as the recurrence needs them, each lane copying the words that
// it will itself use; the same where four a row read them too, fp32 states on the tensor cores; or
// as tiles for these, whose rows lie one behind the other. Words are in an order that lets the
// others meet no bank twice.
enum class Access { kRows, kQuads, kTiles };

// What a lane streams at once: so many passes of kPassRows rows.
template <class S, int kState, Access kAccess>
struct Group {
  using Map = RowMap<S, kState>;
  static constexpr int kRowBytes = kState * int(sizeof(S));
  static constexpr int kPassWords = kPassRows * kRowBytes / (32 * 16);
  static constexpr int kPasses = kGroupWords / kPassWords;
  static_assert(kPassWords > 0 && kPasses > 0);

  // Bytes from a pass to what this lane takes of it; and to its word i from there.
  __device__ static int lane_offset() {
    const int lane = threadIdx.x % 32;
    if constexpr (kAccess == Access::kTiles) return lane * 16;
    return lane / kRowLanes * kRowBytes + lane % kRowLanes * 16;
  }
  static constexpr int word_offset(int i) {
    if constexpr (kAccess == Access::kTiles) return i * (32 * 16);
    return i / Map::kChunks * (32 / kRowLanes * kRowBytes) + i % Map::kChunks * (kRowLanes * 16);
  }
  // Bytes from a group's buffer to where this lane puts its words; and word i from there.
  __device__ static int buffer_offset(int i) {
    const int at = threadIdx.x % 32 * 16 + i * (32 * 16);
    if constexpr (kAccess == Access::kTiles) return swizzled(at);
    if constexpr (kAccess == Access::kQuads)
      return (threadIdx.x % 32 * 16 ^ threadIdx.x / kRowLanes % 2 * 64) + i * (32 * 16);
    return at;
  }
  // To word i of row lane / 4, as four lanes share it.
  __device__ static int quad_offset(int i) {
    static_assert(kAccess == Access::kQuads && kRowBytes == 512);
    const int lane = threadIdx.x % 32, row = lane / 4;
    const int at = row / 4 * (4 * 512) + row % 4 * 128 + (lane % 4 * 16 ^ row % 2 * 64);
    return (at ^ i % 2 * 64) + i / 2 * 512;
  }
  // Of tiles: where the word lies that is so many bytes behind the first.
  __device__ static int swizzled(int at) { return at ^ (at / kRowBytes % 8 * 16); }
};

// A warp's passes [begin, end) of the block's, group by group. Groups end where heads do.
class WarpStream {
 public:
  // rows: the block's first.
  __device__ WarpStream(const StepLaunch& launch, const char* rows, int row_bytes, char* buffer,
                        int begin, int end)
      : launch_(launch), buffer_(buffer), row_bytes_(row_bytes), left_(end - begin) {
    const int head = launch.passes.divide(begin);
    in_head_ = (head + 1) * launch.head_passes - begin;
    from_ = rows + (static_cast<int64_t>(head) * launch.head_dim +
                    (begin - head * launch.head_passes) * kPassRows) *
                       row_bytes;
  }

  // Fetches the first groups.
  template <class G>
  __device__ void start() {
#pragma unroll
    for (int i = 0; i < kGroupsInFlight; ++i) fetch<G>();
  }
  // The next group's words; fetches one more.
  template <class G>
  __device__ void next(uint4 (&words)[kGroupWords]) {
    copy_async_wait_but<kGroupsInFlight - 1>();
    const char* from = buffer_ + slot_ * kGroupBytes + threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < kGroupWords; ++i)
      words[i] = *reinterpret_cast<const uint4*>(from + i * 32 * 16);
    fetch<G>();
  }
  // What is under way has come to all lanes.
  __device__ void await() const {
    copy_async_wait_but<0>();
    __syncwarp();
  }
  // Of the group n behind the next one.
  __device__ const char* buffer(int n) const {
    return buffer_ + (slot_ + n) % kGroupsInFlight * kGroupBytes;
  }
  // No lane needs the next `count` groups' buffers any more: fetches as many.
  template <class G>
  __device__ void refill(int count) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kGroupsInFlight; ++n)
      if (n < count) fetch<G>();
  }
  // Calls fn(buffer) with the next group as tiles; fetches one more.
  template <class G, class Fn>
  __device__ void next_tiles(Fn&& fn) {
    copy_async_wait_but<kGroupsInFlight - 1>();
    __syncwarp();
    fn(buffer_ + slot_ * kGroupBytes);
    __syncwarp();
    fetch<G>();
  }

 private:
  static constexpr int kGroupBytes = kGroupWords * 32 * 16;

  // Every call closes a group of copies, whether there is anything left to copy or not.
  template <class G>
  __device__ void fetch() {
    if (left_ > 0) {
      const int passes = min(G::kPasses, min(in_head_, left_));
      const char* from = from_ + G::lane_offset();
      char* to = buffer_ + slot_ * kGroupBytes;
#pragma unroll
      for (int i = 0; i < kGroupWords; ++i) {
        const int pass = i / G::kPassWords;
        if (pass == 0 || pass < passes)
          copy_async_16(to + G::buffer_offset(i), from + pass * (kPassRows * G::kRowBytes) +
                                                      G::word_offset(i % G::kPassWords));
      }
      advance(passes);
    }
    copy_async_commit();
    slot_ = slot_ + 1 == kGroupsInFlight ? 0 : slot_ + 1;
  }
  __device__ void advance(int passes) {
    left_ -= passes;
    in_head_ -= passes;
    from_ += passes * (kPassRows * row_bytes_);
    if (in_head_ == 0) {
      in_head_ = launch_.head_passes;
      from_ += (launch_.head_dim - launch_.head_passes * kPassRows) * row_bytes_;
    }
  }

  const StepLaunch& launch_;
  char* const buffer_;  // this warp's
  const int row_bytes_;
  const char* from_;
  int left_, in_head_;  // passes left, in all and in the present head
  int slot_ = 0;
};

}  // namespace replayssm::cuda
