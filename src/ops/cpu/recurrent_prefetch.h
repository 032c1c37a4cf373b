// Memory fetched ahead of the blocks that read it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace replayssm::cpu {

// What a block reads of the same rows of several arrays: row j lies in place (first + j) mod wrap,
// and of each array `bytes` of it are read.
struct RowReads {
  struct Part {
    const char* place0 = nullptr;
    int64_t stride = 0, bytes = 0;
  };

  void add(const void* place0, int64_t stride, int64_t bytes) {
    parts[count++] = {static_cast<const char*>(place0), stride, bytes};
  }

  std::array<Part, 4> parts;
  size_t count = 0;
  int64_t rows = 0, first = 0;
  int64_t wrap = std::numeric_limits<int64_t>::max();
};

// What a block reads before its state: rows of the ring and of the window.
struct InputReads {
  RowReads ring, window;
};

// A block's state, and the scales of its rows.
struct StateReads {
  const char *data = nullptr, *scales = nullptr;
  int64_t bytes = 0, scale_bytes = 0;
};

// The blocks of a thread, one behind the other.
class ReadSource {
 public:
  // Of the next block; false behind the last. The two count their own way through the blocks.
  virtual bool next_inputs(InputReads& reads) = 0;
  virtual bool next_state(StateReads& reads) = 0;

 protected:
  ~ReadSource() = default;
};

inline constexpr int64_t kLine = 64;

// A line into the first-level cache, or into the second. Any address will do.
inline void prefetch_near(const char* p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_far(const char* p) { __builtin_prefetch(p, 0, 2); }

// Memory to fetch: `bytes` from `data` on, and as many from `apart` bytes further on. Memory
// delivers two streams faster than one.
struct FetchPiece {
  void fetch() const {
    for (int64_t i = 0; i < bytes; i += kLine) {
      prefetch_far(data + i);
      prefetch_far(data + apart + i);
    }
  }

  const char* data = nullptr;
  int64_t apart = 0, bytes = 0;
};

// Fetches what blocks read ahead of where they are, across blocks, so that memory is busy whatever
// a block does: about as fast as memory delivers while it computes, as much as it reads while it
// reads, and row by row the inputs of the next block.
class Prefetcher {
 public:
  // Everything is one state, which starts anywhere.
  Prefetcher() {
    now_.bytes = front_.bytes = std::numeric_limits<int64_t>::max();
    inputs_block_ = kNever;
    ahead_ = kShortAhead;
  }
  // `bytes`: of all states of the source. Few are left to the core's own prefetcher: they may well
  // be in the cache.
  Prefetcher(ReadSource& source, int64_t bytes) {
    if (bytes <= kFewBytes) {
      ahead_ = 0;
      inputs_block_ = kNever;
      return;
    }
    source_ = &source;
    next_inputs();
  }

  // The next block of the source begins, which reads this state.
  void begin(const StateReads& now) {
    if (source_ == nullptr) return;
    start_ += now_.bytes;
    now_ = now;
    reached_ = start_;
    ++block_;
    if (front_block_ < block_) next_state();
    if (inputs_block_ < block_) next_inputs();
  }

  // `bytes` of the state are about to be read at `position`. Positions outside of it, as those of
  // scratch memory, need no fetching.
  void reading(const void* position, int64_t bytes) {
    if (ahead_ == 0) return;
    if (inputs_block_ <= block_ + 1) fetch_inputs();
    const auto in_state = static_cast<int64_t>(address(position) - address(now_.data));
    if (in_state < 0 || in_state >= now_.bytes) return;
    reached_ = start_ + in_state;
    if (front_block_ == block_ && (fetched() < reached_ || fetched() > reached_ + kMostAhead)) {
      span_ = in_state;
      in_span_ = 0;
    }
    // What is ahead is read faster than memory delivers: a part of it keeps memory busy.
    const int64_t ahead = fetched() - reached_;
    if (ahead < ahead_) {
      next_of_state(2 * bytes).fetch();
    } else if (source_ != nullptr && ahead < kMostAhead) {
      next_of_state(bytes / 4).fetch();
    }
  }

  // Up to `bytes` to fetch while the caller computes without reading.
  FetchPiece computing(int64_t bytes) {
    if (ahead_ == 0 || fetched() >= reached_ + kMostAhead) return {};
    if (inputs_block_ <= front_block_) {
      fetch_inputs();
      return {};
    }
    return next_of_state(bytes);
  }
  // Fetches as much as comes in while a row or two are converted.
  void computing() { computing(kComputeBytes).fetch(); }

 private:
  static constexpr int64_t kAhead = 65536, kMostAhead = 393216, kShortAhead = 4096;
  static constexpr int64_t kComputeBytes = 1024;
  static constexpr int64_t kFewBytes = 262144;
  // What is fetched as two streams, of which each takes a half.
  static constexpr int64_t kSpan = 65536;
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  static uintptr_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

  int64_t fetched() const { return front_start_ + span_ + 2 * in_span_; }

  void next_inputs() {
    row_ = 0;
    inputs_block_ = source_->next_inputs(inputs_) ? inputs_block_ + 1 : kNever;
  }
  void next_state() {
    front_start_ += front_.bytes;
    span_ = in_span_ = 0;
    if (source_ == nullptr || !source_->next_state(front_)) {
      front_ = {};
      front_block_ = kNever;
      return;
    }
    ++front_block_;
    fetch_lines(front_.scales, front_.scale_bytes);
  }

  static void fetch_lines(const char* data, int64_t bytes) {
    const auto before = static_cast<int64_t>(address(data) % kLine);
    for (int64_t i = -before; i < bytes; i += kLine) prefetch_far(data + i);
  }

  // A row of the inputs.
  void fetch_inputs() {
    const int64_t in_ring = inputs_.ring.rows, j = row_++;
    if (j >= in_ring + inputs_.window.rows) return next_inputs();
    const RowReads& reads = j < in_ring ? inputs_.ring : inputs_.window;
    int64_t place = j < in_ring ? reads.first + j : j - in_ring;
    if (place >= reads.wrap) place -= reads.wrap;
    for (size_t i = 0; i < reads.count; ++i) {
      const RowReads::Part& part = reads.parts[i];
      fetch_lines(part.place0 + place * part.stride, part.bytes);
    }
  }

  FetchPiece next_of_state(int64_t bytes) {
    if (front_.bytes == 0) return {};
    const int64_t rest = (front_.bytes - span_) / 2;
    const int64_t half = rest < kSpan / 2 ? (rest + kLine - 1) / kLine * kLine : kSpan / 2;
    bytes = std::min((bytes / 2 + kLine - 1) / kLine * kLine, half - in_span_);
    // As a number: without a source it counts from zero.  NOLINTNEXTLINE(performance-no-int-to-ptr)
    const FetchPiece piece{reinterpret_cast<const char*>(address(front_.data) + span_ + in_span_),
                           half, bytes};
    in_span_ += bytes;
    if (in_span_ == half) {
      span_ += 2 * half;
      in_span_ = 0;
      if (span_ >= front_.bytes) next_state();
    }
    return piece;
  }

  ReadSource* source_ = nullptr;
  int64_t ahead_ = kAhead;
  // The block at hand. Positions count the bytes of all states, one behind the other.
  int64_t block_ = -1, start_ = 0, reached_ = 0;
  StateReads now_;
  // How far states are fetched: all before the span, and of that so much of each half.
  int64_t front_block_ = -1, front_start_ = 0, span_ = 0, in_span_ = 0;
  StateReads front_;
  // How far inputs are.
  int64_t inputs_block_ = -1, row_ = 0;
  InputReads inputs_;
};

// Fetches lines one by one while rows of a state run through many tokens in registers: the rows
// that follow into the first-level cache, and what is read later into the second. More at once, and
// the arithmetic would wait for memory.
class LineFeed {
 public:
  explicit LineFeed(Prefetcher& prefetcher) : prefetcher_(prefetcher) {}

  // `bytes` of the state are read at `position`; kChain: before many tokens.
  template <bool kChain>
  void reading(const void* position, int64_t bytes) {
    prefetcher_.reading(position, bytes);
    if (!kChain) return;
    near_ = static_cast<const char*>(position) + bytes;
    if (far_ < end_) return;
    const FetchPiece piece = prefetcher_.computing(kPiece);
    far_ = piece.bytes > 0 ? piece.data : near_;
    apart_ = piece.apart;
    end_ = far_ + piece.bytes;
  }

  // A token's share; kLong: of a family whose tokens take long.
  template <bool kLong>
  void token() {
    prefetch_near(near_);
    near_ += kLine;
    for (int i = 0; i < (kLong ? 2 : 1); ++i) {
      prefetch_far(far_);
      prefetch_far(far_ + apart_);
      far_ += kLine;
    }
  }

 private:
  static constexpr int64_t kPiece = 4096;

  Prefetcher& prefetcher_;
  const char *near_ = nullptr, *far_ = nullptr, *end_ = nullptr;
  int64_t apart_ = 0;
};

}  // namespace replayssm::cpu
