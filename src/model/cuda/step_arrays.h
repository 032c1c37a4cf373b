// The index arrays of a pass, copied to the device in one piece.
#pragma once

#include "model/backend.h"
#include "model/cuda/event.h"
#include "ops/cuda/device.h"
#include "ops/cuda/sampling.h"

namespace replayssm {

enum class PassKind : uint8_t { kForward, kDraft, kDraftOfDraft };

// How many places a pass has: as many as the batch needs, or more, so that batches of similar sizes
// lie in memory alike; and what else of it is fixed.
struct PassPlaces {
  int64_t tokens = 0;
  int64_t sequences = 0;
  int64_t logits = 0;
  int64_t block_table_stride = 0;
  bool draws = false;   // tokens are drawn
  int64_t history = 0;  // of a row's tokens that penalties look at; 0: there are no penalties
  PassKind kind = PassKind::kForward;
  int64_t window = 1;     // of decoding sequences, at most
  bool deferred = false;  // they await their commit
  bool trees = false;
  bool sources = false;  // Batch::source is given
  KeepHidden keep_hidden = KeepHidden::kNone;

  bool operator==(const PassPlaces&) const = default;
};

class StepArrays {
 public:
  explicit StepArrays(cuda::DeviceMemory& memory) : memory_(memory) {}

  void reserve(const PassPlaces& places);

  // Enqueues the copy. Places beyond the batch hold tokens of id -1, empty windows in slot -1 and
  // logits of row -1. Waits for the copy before the last.
  void assign(const Batch& batch, std::span<const TokenDraw> draws, const PassPlaces& places,
              cudaStream_t stream, std::span<const int32_t> hidden_row = {});

  const PassArrays& arrays() const { return arrays_; }
  const int32_t* windows() const { return windows_; }  // [sequences] lengths
  SequencePlan* plan() const { return plan_; }         // [sequences] places for it
  // [logits]; null where nothing is drawn.
  const cuda::SamplingRow* sampling() const { return sampling_; }
  const int64_t* drawn_position() const { return drawn_position_; }
  const cuda::SamplingHistory& history() const { return history_; }

 private:
  class Packer;

  static int64_t bytes_of(const PassPlaces& places);
  void pack_draws(std::span<const TokenDraw> draws, const PassPlaces& places, Packer& packer);

  cuda::DeviceMemory& memory_;
  cuda::PinnedMemory pinned_;
  // What a copy under way reads.
  struct Source {
    Buffer host;
    Event copied;
  };
  Source sources_[2];
  Buffer device_;
  int turn_ = 0;
  PassArrays arrays_;
  const int32_t* windows_ = nullptr;
  SequencePlan* plan_ = nullptr;
  const cuda::SamplingRow* sampling_ = nullptr;
  const int64_t* drawn_position_ = nullptr;
  cuda::SamplingHistory history_;
};

}  // namespace replayssm
