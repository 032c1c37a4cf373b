// How a call of the recurrence is cut into blocks of work, and what scratch memory a block uses.
#pragma once

#include <algorithm>
#include <cstdint>

#include "replay/cursor.h"
#include "replayssm/ops.h"

namespace replayssm::cpu {

// Scratch rows are padded with zeros to whole vectors of the widest instruction set.
inline constexpr int64_t kPadFloats = 16;
constexpr int64_t padded(int64_t count) {
  return (count + kPadFloats - 1) / kPadFloats * kPadFloats;
}

// Hands out consecutive pieces of a workspace; without memory it only counts.
class Carver {
 public:
  explicit Carver(float* memory) : memory_(memory) {}
  float* take(int64_t floats) {
    float* piece = memory_ ? memory_ + used_ : nullptr;
    used_ += padded(floats);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  float* memory_;
  int64_t used_ = 0;
};

// Most value heads of a block.
inline constexpr int64_t kBlockHeads = 8;

// Some value heads of one key head of one sequence.
struct Block {
  int64_t sequence = 0;
  int64_t key_head = 0;
  int64_t head_begin = 0, head_end = 0;
  bool first_of_key_head = false;
};

// All blocks of a call: whole key heads where they are enough to occupy the threads and have at
// most `max_heads` value heads, else parts.
class BlockList {
 public:
  BlockList(int64_t sequences, const RecurrentShape& shape, int threads)
      : sequences_(sequences), key_heads_(shape.key_heads) {
    heads_per_key_ = shape.heads / shape.key_heads;
    const int64_t wanted = 2 * int64_t{threads};
    const int64_t have = std::max<int64_t>(1, sequences * key_heads_);
    const int64_t least = (heads_per_key_ + kBlockHeads - 1) / kBlockHeads;
    parts_ = std::clamp<int64_t>((wanted + have - 1) / have, least, heads_per_key_);
  }

  int64_t per_sequence() const { return key_heads_ * parts_; }
  int64_t count() const { return sequences_ * per_sequence(); }

  Block operator[](int64_t i) const {
    Block block;
    block.sequence = i / (key_heads_ * parts_);
    block.key_head = i / parts_ % key_heads_;
    const int64_t part = i % parts_, first = block.key_head * heads_per_key_;
    block.head_begin = first + heads_per_key_ * part / parts_;
    block.head_end = first + heads_per_key_ * (part + 1) / parts_;
    block.first_of_key_head = part == 0;
    return block;
  }

 private:
  int64_t sequences_, key_heads_, heads_per_key_ = 1, parts_ = 1;
};

// The order in which a thread takes its blocks [begin, end). Blocks that fold compute for long:
// they are spread among those that read, so that memory always has something to fetch.
class BlockOrder {
 public:
  BlockOrder(const BlockList& blocks, const SequenceBatch& batch, int64_t begin, int64_t end)
      : blocks_(blocks), batch_(batch), next_{begin, begin} {
    for (int64_t i = begin; i < end; ++i) ++count_[folds(i)];
  }

  // A place in the list, or -1 behind the last.
  int64_t next() {
    // The kind of which the smaller share is done.
    const bool fold = taken_[1] * count_[0] <= taken_[0] * count_[1];
    const bool kind = taken_[fold] < count_[fold] ? fold : !fold;
    if (taken_[kind] == count_[kind]) return -1;
    ++taken_[kind];
    int64_t& i = next_[kind];
    while (folds(i) != kind) ++i;
    return i++;
  }

 private:
  bool folds(int64_t i) const {
    const int32_t slot = batch_.slot[i / blocks_.per_sequence()];
    return slot >= 0 && batch_.cursors[slot].fold_count > 0;
  }

  const BlockList& blocks_;
  const SequenceBatch& batch_;
  int64_t next_[2], count_[2] = {}, taken_[2] = {};  // of those that read, of those that fold
};

// The rows that a block replays, oldest first: ring rows, then the window.
struct Replay {
  int64_t rows = 0;      // all of them
  int64_t window = 0;    // the last ones: this step's tokens
  int64_t stored = 0;    // the first ones: their effect goes into the checkpoint
  int64_t replayed = 0;  // the first ones: run through the state in registers, at least `stored`
  const int32_t* parent = nullptr;  // [window], null: a chain

  int64_t first_of_window() const { return rows - window; }
  // The row that row j follows.
  int64_t before(int64_t j) const {
    return parent == nullptr || j < first_of_window()
               ? j - 1
               : first_of_window() + parent[j - first_of_window()];
  }
};

// What recurrent_step needs of one value head.
struct HeadScratch {
  float *v, *o;  // [rows, height], [window, height]
  float* t;      // [window, width]
  float* a;      // [rows]; Kimi Delta: [rows, width]
  float* b;      // [rows]
  float* c;      // [window, rows]
};

// Most rows of a state that run through registers together.
inline constexpr int64_t kMostRows = 4;

// Scratch of one thread for recurrent_step.
struct StepScratch {
  StepScratch(float* memory, const RecurrentShape& shape, const RingConfig& ring)
      : rows(ring_rows(ring.buffer_len, ring.max_window)),
        width(padded(shape.state_dim)),
        height(padded(shape.head_dim)) {
    const int64_t window = ring.max_window;
    Carver carver(memory);
    k = carver.take(rows * width);
    q = carver.take(window * width);
    kq = carver.take(window * rows);
    weight = carver.take(rows);
    value = reinterpret_cast<const void**>(carver.take(2 * rows));
    row = reinterpret_cast<int64_t*>(carver.take(2 * window));
    fresh = carver.take(kMostRows * width);
    state = carver.take(shape.head_dim * shape.state_dim);
    for (int64_t h = 0; h < std::min(kBlockHeads, shape.heads / shape.key_heads); ++h)
      heads[h] = {.v = carver.take(rows * height),
                  .o = carver.take(window * height),
                  .t = carver.take(window * width),
                  .a = carver.take(shape.family == Family::kKimiDelta ? rows * width : rows),
                  .b = carver.take(rows),
                  .c = carver.take(window * rows)};
    floats = carver.used();
  }

  int64_t rows;           // of ring and window together, at most
  int64_t width, height;  // padded state_dim and head_dim; zero beyond those
  float* k;               // [rows, width]
  float* q;               // [window, width]
  float* kq;              // [window, rows]
  float* weight;          // [rows] c of the rows whose values are mixed
  const void** value;     // [rows] where these values are
  int64_t* row;           // [window] where the walk of each query is
  float* fresh;           // [kMostRows, width], rows on their way to a HeadWriter
  float* state;           // [head_dim, state_dim], a read copy's values
  HeadScratch heads[kBlockHeads];
  int64_t floats;  // of all of them
};

// Tokens that recurrent_prefill takes together.
inline constexpr int64_t kChunk = 64;

// Scratch of one thread for recurrent_prefill.
struct PrefillScratch {
  PrefillScratch(float* memory, const RecurrentShape& shape)
      : width(padded(shape.state_dim)), height(padded(shape.head_dim)) {
    Carver carver(memory);
    k = carver.take(kChunk * width);
    q = carver.take(kChunk * width);
    kt = carver.take(width * kChunk);
    qk = carver.take(kChunk * kChunk);
    kk = carver.take(kChunk * kChunk);
    mix = carver.take(kChunk * kChunk);
    u = carver.take(kChunk * height);
    o = carver.take(kChunk * height);
    decay = carver.take(kChunk * kChunk);
    total = carver.take(kChunk);
    state = carver.take(std::min(kBlockHeads, shape.heads / shape.key_heads) * width * height);
    floats = carver.used();
  }

  int64_t width, height;
  float *k, *q;    // [kChunk, width]
  float* kt;       // [width, kChunk], k transposed
  float *qk, *kk;  // [kChunk, kChunk], q k^T and k k^T
  float* mix;      // [kChunk, kChunk]
  float *u, *o;    // [kChunk, height]
  float* decay;    // [kChunk, kChunk], from just after token j up to token i
  float* total;    // [kChunk], from the start of the chunk
  float* state;    // [heads of the block, width, height], transposed
  int64_t floats;  // of all of them
};

// Tokens that the prefill of Kimi Delta takes together: their keys and decays stay in the
// first-level cache.
inline constexpr int64_t kPiece = 16;

// Scratch of one thread for recurrent_prefill of Kimi Delta.
struct PieceScratch {
  PieceScratch(float* memory, const RecurrentShape& shape)
      : step(memory, shape, {.buffer_len = 1, .max_window = kPiece}) {
    Carver carver(memory ? memory + step.floats : nullptr);
    state = carver.take(std::min(kBlockHeads, shape.heads / shape.key_heads) * shape.head_dim *
                        shape.state_dim);
    floats = step.floats + carver.used();
  }

  StepScratch step;
  float* state;    // [heads of the block, head_dim, state_dim]
  int64_t floats;  // of all of them
};

}  // namespace replayssm::cpu
