// The keys and values of all attention layers, in blocks that sequences take as they grow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/buffer.h"
#include "model/config.h"

namespace replayssm {

class KvPool {
 public:
  static constexpr int64_t kBlockSize = 32;  // tokens

  KvPool(const ModelConfig& config, DType dtype, int64_t blocks, Memory& memory = host_memory());

  static int64_t bytes_per_block(const ModelConfig& config, DType dtype);  // all layers together
  static int64_t blocks_for(int64_t tokens) { return (tokens + kBlockSize - 1) / kBlockSize; }

  // One per attention layer: [blocks, heads, kBlockSize, head_dim] (KvShape). Where the keys serve
  // as values, both are the same memory.
  const std::vector<void*>& keys() const { return keys_; }
  const std::vector<void*>& values() const { return values_; }
  int64_t blocks() const { return blocks_; }
  int64_t free_blocks() const { return static_cast<int64_t>(free_.size()); }
  int64_t bytes() const { return bytes_; }

  // Extends `table` to cover `tokens`; false (and nothing taken) when too few blocks are free.
  bool grow(std::vector<int32_t>& table, int64_t tokens);
  // Gives back a user's hold of every block; those that nobody holds any more are free.
  void release(std::vector<int32_t>& table);

  // One more user of a taken block.
  void share(int32_t block) { ++users_[block]; }
  void release(int32_t block);
  int32_t users(int32_t block) const { return users_[block]; }

  // All of a block, on the host.
  int64_t block_bytes() const { return bytes_ / blocks_; }
  void read_block(int32_t block, std::byte* host) const;
  void write_block(int32_t block, const std::byte* host);

 private:
  Memory* device_;
  std::vector<void*> keys_, values_;
  std::vector<Buffer> memory_;
  std::vector<int32_t> free_;
  std::vector<int32_t> users_;  // [blocks]
  int64_t blocks_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace replayssm
