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

// Fetches what blocks read ahead of where they are. While a state is read, it follows a short way
// behind, and the inputs of the next block are fetched row by row. Phases that compute without
// reading run further ahead, across blocks, so that memory is busy meanwhile. Pieces have few
// sizes: loops over their lines are easy to predict.
class Prefetcher {
 public:
  // Without a source everything is one state, which starts anywhere.
  Prefetcher() {
    now_.bytes = front_.bytes = std::numeric_limits<int64_t>::max();
    inputs_block_ = kNever;
  }
  explicit Prefetcher(ReadSource& source) : source_(&source) { next_inputs(); }

  // The next block of the source begins, which reads this state.
  void begin(const StateReads& now) {
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

  // The state is being read at `position`, `bytes` at a time. Positions outside of it, as those of
  // scratch memory, need no fetching.
  void reading(const void* position, int64_t bytes) {
    if (inputs_block_ <= block_ + 1) fetch_inputs();
    const auto in_state = static_cast<int64_t>(address(position) - address(now_.data));
    if (in_state < 0 || in_state >= now_.bytes) return;
    reached_ = start_ + in_state;
    if (front_block_ == block_ && (fetched_ < reached_ || fetched_ > reached_ + kRunAhead)) {
      fetched_ = reached_;
      in_front_ = in_state;
    }
    // The distance is made up where nothing was fetched ahead.
    if (fetched_ < reached_ + kReadAhead) fetch_state(2 * bytes);
  }

  // A while passes without reading, as long as it takes to fetch kComputeBytes.
  void computing() {
    if (fetched_ >= reached_ + kRunAhead) return;
    if (inputs_block_ <= front_block_) return fetch_inputs();
    fetch_state(kComputeBytes);
  }

 private:
  static constexpr uintptr_t kLine = 64;
  static constexpr int64_t kReadAhead = 4096, kRunAhead = 262144;
  static constexpr int64_t kComputeBytes = 1024;
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  static uintptr_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }
  static void fetch_lines(uintptr_t at, int64_t bytes) {
    const uintptr_t end = at + static_cast<uintptr_t>(bytes);
    for (at -= at % kLine; at < end; at += kLine)  // NOLINTNEXTLINE(performance-no-int-to-ptr)
      __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2);
  }

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
    fetch_lines(address(front_.scales), front_.scale_bytes);
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
      fetch_lines(address(part.place0 + place * part.stride), part.bytes);
    }
  }

  void fetch_state(int64_t bytes) {
    const int64_t piece = std::min(bytes, front_.bytes - in_front_);
    fetch_lines(address(front_.data) + static_cast<uintptr_t>(in_front_), piece);
    in_front_ += piece;
    fetched_ += piece;
    if (in_front_ == front_.bytes) next_state();
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

}  // namespace replayssm::cpu
