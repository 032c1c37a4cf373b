#include "engine/pass_builder.h"

#include <algorithm>

namespace replayssm {

void PassBuilder::add(int32_t slot, int64_t position, std::span<const int32_t> blocks,
                      int32_t source) {
  query_start_.push_back(tokens());
  slot_.push_back(slot);
  position_.push_back(position);
  blocks_.push_back(blocks);
  source_.push_back(source);
}

void PassBuilder::push(int32_t token, int32_t parent) {
  const int32_t row = tokens() - query_start_[query_start_.size() - 2];
  trees_ = trees_ || parent != row - 1;
  token_ids_.push_back(token);
  parent_.push_back(parent);
  query_start_.back() = tokens();
}

Batch PassBuilder::batch(int64_t decodes) {
  size_t stride = 0;
  for (const auto& blocks : blocks_) stride = std::max(stride, blocks.size());
  block_table_.clear();
  for (const auto& blocks : blocks_) {
    block_table_.insert(block_table_.end(), blocks.begin(), blocks.end());
    block_table_.resize(block_table_.size() + stride - blocks.size(), -1);
  }
  Batch batch{.token_ids = token_ids_,
              .query_start = query_start_,
              .slot = slot_,
              .position = position_,
              .block_table = block_table_,
              .block_table_stride = static_cast<int64_t>(stride),
              .decodes = decodes,
              .logit_tokens = logit_tokens_,
              .source = source_};
  if (trees_) batch.parent = parent_;
  return batch;
}

}  // namespace replayssm
