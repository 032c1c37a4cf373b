// The arrays behind a Batch, filled sequence by sequence.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/model.h"

namespace replayssm {

class PassBuilder {
 public:
  void clear() { *this = {}; }

  // The next sequence: a window of new tokens behind `position` others.
  void add(int32_t slot, int64_t position, std::span<const int32_t> blocks, int32_t source = -1);
  void push(int32_t token, int32_t parent);                      // of that sequence
  void want_logits() { logit_tokens_.push_back(tokens() - 1); }  // of the last token

  int32_t tokens() const { return static_cast<int32_t>(token_ids_.size()); }  // so far
  int64_t logits() const { return static_cast<int64_t>(logit_tokens_.size()); }
  int64_t sequences() const { return static_cast<int64_t>(slot_.size()); }

  // Valid until the next change. The first `decodes` sequences decode.
  Batch batch(int64_t decodes);

 private:
  std::vector<int32_t> token_ids_, query_start_{0}, slot_, block_table_, logit_tokens_, parent_,
      source_;
  std::vector<int64_t> position_;
  std::vector<std::span<const int32_t>> blocks_;
  bool trees_ = false;
};

}  // namespace replayssm
