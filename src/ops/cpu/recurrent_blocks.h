// How a call of the recurrence is cut into blocks of work, and what scratch memory a block uses.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/check.h"
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

  int64_t count() const { return sequences_ * key_heads_ * parts_; }

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

// What recurrent_step needs of one value head.
struct HeadScratch {
  float *v, *o;  // [rows, height], [window, height]
  float* t;      // [window, width]
  float *a, *b;  // [rows]
  float* c;      // [window, rows]
};

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
    for (int64_t h = 0; h < std::min(kBlockHeads, shape.heads / shape.key_heads); ++h)
      heads[h] = {.v = carver.take(rows * height),
                  .o = carver.take(window * height),
                  .t = carver.take(window * width),
                  .a = carver.take(rows),
                  .b = carver.take(rows),
                  .c = carver.take(window * rows)};
    floats = carver.used();
  }

  int64_t rows;           // of ring and window together, at most
  int64_t width, height;  // padded state_dim and head_dim; zero beyond those
  float* k;               // [rows, width]
  float* q;               // [window, width]
  float* kq;              // [window, rows]
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

template <class Fn>
decltype(auto) dispatch_family(Family family, Fn&& fn) {
  if (family == Family::kMamba2) return fn.template operator()<Family::kMamba2>();
  return fn.template operator()<Family::kGatedDelta>();
}

inline void check_recurrent(const RecurrentShape& shape, const SequenceBatch& batch,
                            const RecurrentState& state) {
  REPLAYSSM_CHECK(shape.family != Family::kKimiDelta && batch.parent == nullptr &&
                      state.read_copy.data == nullptr,
                  "not on this backend yet");
  REPLAYSSM_CHECK(shape.heads > 0 && shape.key_heads > 0 && shape.heads % shape.key_heads == 0,
                  "heads=", shape.heads, " key_heads=", shape.key_heads);
  REPLAYSSM_CHECK(shape.head_dim > 0, "head_dim=", shape.head_dim);
  REPLAYSSM_CHECK(shape.state_dim > 0 && shape.state_dim <= kMaxStateDim,
                  "state_dim=", shape.state_dim, ", at most ", kMaxStateDim);
  REPLAYSSM_CHECK(batch.sequences >= 0, "sequences=", batch.sequences);
  REPLAYSSM_CHECK(batch.ring.buffer_len >= 1 && batch.ring.max_window >= 1,
                  "buffer_len=", batch.ring.buffer_len, " max_window=", batch.ring.max_window);
  REPLAYSSM_CHECK(state.checkpoint != nullptr, "no checkpoint memory");
}

}  // namespace replayssm::cpu
