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

// Memory to fetch.
struct FetchPiece {
  void fetch() const {
    for (int64_t i = 0; i < bytes; i += kLine) prefetch_far(data + i);
  }

  const char* data = nullptr;
  int64_t bytes = 0;
};

// Fetches what blocks read ahead of where they are. While a state is read, it follows a short way
// behind, and the inputs of the next block are fetched row by row. Phases that compute without
// reading run further ahead, across blocks, so that memory is busy meanwhile. Pieces have few
// sizes: loops over their lines are easy to predict.
class Prefetcher {
 public:
  // How far ahead of the place that is read, by the size of its elements, and of the place that is
  // read and written back.
  static constexpr int64_t read_ahead(size_t element) { return element == 4 ? 1024 : 4096; }
  static constexpr int64_t kRewriteAhead = 4096;

  // Everything is one state, which starts anywhere.
  Prefetcher() {
    now_.bytes = front_.bytes = std::numeric_limits<int64_t>::max();
    inputs_block_ = kNever;
  }
  // `bytes`: of all states of the source. Few are left to the core's own prefetcher: they may well
  // be in the cache.
  Prefetcher(ReadSource& source, int64_t bytes) {
    if (bytes <= kFewBytes) {
      fetched_ = kRunAhead;
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
    if (front_block_ < block_) {
      next_state();
      fetched_ = start_;
    }
    if (inputs_block_ < block_) next_inputs();
  }

  // The state is being read at `position`, `bytes` at a time; returns what to fetch meanwhile.
  // Positions outside of it, as those of scratch memory, need no fetching.
  FetchPiece reading(const void* position, int64_t bytes, int64_t distance) {
    if (inputs_block_ <= block_ + 1) fetch_inputs();
    const auto in_state = static_cast<int64_t>(address(position) - address(now_.data));
    if (in_state < 0 || in_state >= now_.bytes) return {};
    reached_ = start_ + in_state;
    if (front_block_ == block_ && (fetched_ < reached_ || fetched_ > reached_ + kRunAhead)) {
      fetched_ = reached_;
      in_front_ = in_state;
    }
    // The distance is made up where nothing was fetched ahead.
    if (fetched_ >= reached_ + distance) return {};
    return next_of_state(2 * bytes);
  }

  // Up to `bytes` to fetch while the caller computes without reading.
  FetchPiece computing(int64_t bytes) {
    if (fetched_ >= reached_ + kRunAhead) return {};
    if (inputs_block_ <= front_block_) {
      fetch_inputs();
      return {};
    }
    return next_of_state(bytes);
  }
  // Fetches as much as comes in while a row or two are converted.
  void computing() { computing(kComputeBytes).fetch(); }

 private:
  static constexpr int64_t kRunAhead = 262144, kComputeBytes = 1024;
  static constexpr int64_t kFewBytes = 262144;
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  static uintptr_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

  void next_inputs() {
    row_ = 0;
    inputs_block_ = source_->next_inputs(inputs_) ? inputs_block_ + 1 : kNever;
  }
  void next_state() {
    in_front_ = 0;
    if (source_ == nullptr || !source_->next_state(front_)) {
      front_ = {};
      front_block_ = kNever;
      return;
    }
    ++front_block_;
    lines(front_.scales, front_.scale_bytes).fetch();
  }

  // The lines of `bytes` of memory.
  static FetchPiece lines(const char* data, int64_t bytes) {
    const auto before = static_cast<int64_t>(address(data) % kLine);
    return {data - before, before + bytes};
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
      lines(part.place0 + place * part.stride, part.bytes).fetch();
    }
  }

  FetchPiece next_of_state(int64_t bytes) {
    bytes = std::min(bytes, front_.bytes - in_front_);
    // As a number: without a source it counts from zero.  NOLINTNEXTLINE(performance-no-int-to-ptr)
    const FetchPiece piece{reinterpret_cast<const char*>(address(front_.data) + in_front_), bytes};
    in_front_ += bytes;
    fetched_ += bytes;
    if (in_front_ == front_.bytes) next_state();
    return piece;
  }

  ReadSource* source_ = nullptr;
  // The block at hand. Positions count the bytes of all states, one behind the other.
  int64_t block_ = -1, start_ = 0, reached_ = 0;
  StateReads now_;
  // How far states are fetched.
  int64_t front_block_ = -1, in_front_ = 0, fetched_ = 0;
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
    prefetcher_.reading(position, bytes, Prefetcher::kRewriteAhead).fetch();
    if (!kChain) return;
    near_ = static_cast<const char*>(position) + bytes;
    if (far_ < end_) return;
    const FetchPiece piece = prefetcher_.computing(kPiece);
    far_ = piece.bytes > 0 ? piece.data : near_;
    end_ = far_ + piece.bytes;
  }

  // A token's share.
  void token() {
    prefetch_near(near_);
    prefetch_far(far_);
    near_ += kLine;
    far_ += kLine;
  }

 private:
  static constexpr int64_t kPiece = 4096;

  Prefetcher& prefetcher_;
  const char *near_ = nullptr, *far_ = nullptr, *end_ = nullptr;
};

}  // namespace replayssm::cpu
